"""Finds a model's residual stream: the modules that write it, the norms that read it, and the matrices behind these.

The stream begins with an embedding that reaches a norm. Whatever else reaches this norm writes the stream too, and
whatever they reach reads it. No module is found by its name (`trace.py`). The stream can be rotated if sums alone lie
between the writers and the readers, if writers are matrices or embeddings, and if norms and matrices alone read it, and
matrices alone what these norms give. What this pass cannot see, such as a product between a writer and the stream, the
comparison of the outputs finds (`rotate.py`). docs/mathematics.md, section Rotated stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from .trace import Trace, channels_read, is_matrix, is_norm, is_table

ELSE = "quantise it without a rotation."


@dataclass(frozen=True)
class Stream:
    """The modules around a residual stream, by their paths.

    Attributes:
        channels: the number of channels, E.
        writers: the matrices and embeddings that add to the stream.
        norms: by norm that reads the stream: the matrices that read what it gives.
        bare: the matrices that read the stream without a norm.
    """

    channels: int
    writers: tuple[str, ...]
    norms: Mapping[str, tuple[str, ...]]
    bare: tuple[str, ...]

    @property
    def matrices(self) -> dict[str, None]:
        """Every module whose weights are rotated, in the order writers, readers; a module may be both."""
        readers = (reader for behind in self.norms.values() for reader in behind)
        return dict.fromkeys((*self.writers, *readers, *self.bare))


def stream_of(root: Any, trace: Trace) -> Stream:
    """The residual stream of a model.

    Args:
        root: the model.
        trace: what one forward pass showed.

    Raises:
        ValueError: there is none, or it cannot be rotated.
    """
    name, modules = type(root).__name__, dict(root.named_modules())
    if rested := _rested(trace, modules):
        raise ValueError(
            f"{_listed(rested)} of {name} did not run on the first batch, so what they read is not known; pass a batch "
            "that reaches every part of the model, or " + ELSE
        )
    writers = _writers(trace, modules)
    if not writers:
        raise ValueError(f"no embedding of {name} reaches a norm, so it has no stream of tokens to rotate; " + ELSE)
    if all(isinstance(modules[path], nn.Embedding) for path in writers):
        raise ValueError(
            f"no layer of {name} adds to what its embeddings give, so this is no residual stream (embeddings of fewer "
            f"channels, or a post-norm model); {ELSE}"
        )
    channels = trace.width[next(iter(writers))]
    for path in writers:
        _check_writer(path, modules[path], trace, channels)
    readers = dict.fromkeys(reader for path in writers for reader in trace.readers(path))
    norms = {path: trace.readers(path) for path in readers if is_norm(modules[path])}
    bare = tuple(path for path in readers if path not in norms)
    for path, behind in norms.items():
        _check_norm(path, behind, modules, trace)
    for path in (*bare, *(reader for behind in norms.values() for reader in behind)):
        if channels_read(modules[path]) != channels:
            raise ValueError(f"{path} of {name} reads the stream in another shape, not as {channels} channels; " + ELSE)
    return Stream(channels, tuple(writers), norms, bare)


def _rested(trace: Trace, modules: Mapping[str, nn.Module]) -> list[str]:
    """Norms and matrices that did not run, and whose weights are not those of another module that did."""
    ran = {id(each) for path in trace.called for each in modules[path].parameters()}
    still = [*trace.rested, *(path for path in modules if is_norm(modules[path]) and path not in trace.called)]
    return [path for path in still if not all(id(each) in ran for each in modules[path].parameters())]


def _writers(trace: Trace, modules: Mapping[str, nn.Module]) -> dict[str, None]:
    """Embeddings that reach a norm, and all sources that reach what they, and these sources, reach."""
    found = {
        path: None
        for path in trace.width
        if isinstance(modules[path], nn.Embedding) and any(is_norm(modules[each]) for each in trace.readers(path))
    }
    waiting = list(found)
    while waiting:
        for reader in trace.readers(waiting.pop()):
            new = trace.reads[reader] - found.keys()
            found |= dict.fromkeys(sorted(new))
            waiting += new
    return found


def _check_writer(path: str, module: nn.Module, trace: Trace, channels: int) -> None:
    """Refuse a source that cannot be rotated.

    Raises:
        ValueError: it is no plain matrix or embedding, has other channels, or reaches something else than norms and
            matrices.
    """
    if is_norm(module):
        raise ValueError(_added(path))
    if not (is_matrix(module) or is_table(module)) or trace.width[path] != channels:
        raise ValueError(
            f"{path} ({type(module).__name__}) reaches the residual stream, and is no plain matrix of {channels} "
            f"outputs; {ELSE}"
        )
    if path in trace.given:
        raise ValueError(
            f"the model gives its residual stream as an output ({path} reaches it), which a rotation would change; "
            "load the model with its head, and without output_hidden_states in its config."
        )
    modules = dict(trace.root.named_modules())
    if other := [each for each in trace.readers(path) if not (is_norm(modules[each]) or is_matrix(modules[each]))]:
        raise ValueError(f"{_listed(other)} reads the residual stream, and is no norm or plain matrix; {ELSE}")


def _check_norm(path: str, behind: Iterable[str], modules: Mapping[str, nn.Module], trace: Trace) -> None:
    """Refuse a norm behind which something else stands than matrices that read it alone.

    Raises:
        ValueError: there is something else.
    """
    if path in trace.given:
        raise ValueError(
            f"the model gives what the norm {path} gives as an output, which a rotation would change; load a model "
            "without its head with it, and quantise others without a rotation."
        )
    if any(is_norm(modules[each]) for each in behind):
        raise ValueError(_added(path))
    if other := [each for each in behind if not is_matrix(modules[each])]:
        raise ValueError(
            f"what the norm {path} gives is read by {_listed(other)}, which is no plain matrix (a router, experts that "
            f"are one parameter); {ELSE}"
        )
    if mixed := [each for each in behind if trace.reads[each] != {path}]:
        raise ValueError(f"{_listed(mixed)} reads something else beside what the norm {path} gives; {ELSE}")


def _added(path: str) -> str:
    """Why a norm whose output goes on as a stream is refused."""
    return (
        f"what the norm {path} gives is added to the residual stream, or is this stream: a post-norm block, a norm "
        f"behind the embedding or at the end of a branch, or experts that are no plain matrices; {ELSE}"
    )


def _listed(paths: Iterable[str]) -> str:
    """The first paths of many."""
    every = list(paths)
    return ", ".join(every[:3]) + (f" and {len(every) - 3} more" if len(every) > 3 else "")
