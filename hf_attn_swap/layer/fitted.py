"""Defines the base class of a fit: what a conversion leaves in one swapped layer, beside the variant and its strength.

A fit is a child of the swap, under its registered name. It is data of the layer, so it is saved with the layer: its
`spec` is the value under its name in the layer's entry of `config.attn_swap`, and its parameters and buffers are saved
with the weights. Saving, loading, `describe`, copies, undoing and merging go through this class and name no single fit.
Axes: B batch, L token, H head, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from ..core.call import Call, DeviceAndDtype, Geometry
from ..variants.base import VARIANTS, Variant

ENTRY = ("variant", "layers", "options", "strength", "modules", "retrained")  # keys of an entry that belong to no fit

CALL, HEADS, AROUND = "call", "heads", "around"


class Fitted(nn.Module):
    """The base class of all fits. A subclass says where it acts, and uses `@fitted`.

    A fit acts in one place:

    - `CALL`: the method `prepare` puts something into the `Call` before the layer computes, for the variants to read.
    - `HEADS`: `forward` changes the heads, from (B,L,H,D) to (B,L,H,D), after the variant at the place "read". At a
      strength s between 0 and 1, the layer computes (1 - s) A + s forward(A).
    - `AROUND`: the fit scaled weights around the swap, so that the model stays the same function, and acts in no call.
      `undo` takes this back when the swap leaves its layer.

    A conversion does not change a fit that is in a layer, but puts a new one in its place. So the fits themselves are
    what `Swap.restore` needs to undo it. Only a training changes the parameters of a fit.

    Attributes:
        name: the name of the fit, its key in the config and its name in the swap; `fitted` sets this attribute.
        place: where the fit acts.
    """

    name: ClassVar[str]
    place: ClassVar[str]

    @classmethod
    def check(cls, spec: Any, classes: tuple[type[Variant], ...], strength: float) -> None:
        """Check what a config says of this fit. Nothing of it is trusted: the file may come from a stranger.

        Args:
            spec: the value under the fit's name.
            classes: the variants of the layer.
            strength: the strength of the layer.

        Raises:
            ValueError: `spec` is nothing that the method `spec` returns for such a layer. The error names the fit.
        """
        raise NotImplementedError

    @classmethod
    def from_spec(cls, spec: Any, geometry: Geometry) -> Fitted:
        """Make the fit that a config describes. The values of its parameters and buffers load later.

        Args:
            spec: a value that `check` let through.
            geometry: the sizes of the attention module.

        Raises:
            ValueError: the fit was made for a module of other sizes.
        """
        raise NotImplementedError

    def spec(self) -> Any:
        """The description of the fit in config.json, as JSON data."""
        raise NotImplementedError

    def words(self) -> str:
        """The fit of one layer in a few words, for `describe`."""
        raise NotImplementedError

    def sentence(self, layers: int) -> str:
        """The fit of several layers in one sentence, for reports."""
        return f"{self.words().capitalize()} in {layers} layers."

    def prepare(self, call: Call) -> None:
        """Place `CALL`: put what the variants read into the call, before the layer computes."""

    def undo(self, root: nn.Module, path: str) -> Callable[[], None]:
        """Place `AROUND`: prepare to take back what the fit changed in weights outside of the swap.

        Args:
            root: the model.
            path: the path of the layer's attention module.

        Returns:
            A function that changes the weights. It is called after every fit of the change is prepared.

        Raises:
            ValueError: the weights cannot be taken back. Nothing is changed yet.
        """
        return lambda: None

    def linear(self) -> tuple[Tensor, Tensor | None]:
        """Place `HEADS`: the linear map of each head that the fit is. A merge folds it into the weights.

        Returns:
            A gain per head (H,), or a matrix per head (H,D,D), applied as `heads @ matrix`; and the bias (H,D) or None.

        Raises:
            ValueError: the fit is no linear map, so it cannot be merged.
        """
        raise ValueError(f"the fit {self.name!r} is no linear map of the heads, so it cannot be merged; keep it.")

    def placed_like(self, like: DeviceAndDtype | Tensor) -> Fitted:
        """Move the fit to the device of `like`, and cast its parameters and buffers to the dtype of `like`."""
        return self.to(device=like.device, dtype=like.dtype)


FITTED: dict[str, type[Fitted]] = {}
F = TypeVar("F", bound=type[Fitted])


def fitted(name: str) -> Callable[[F], F]:
    """Register a fit under `name`. The order of registration is the order in which fits act and are described.

    Raises:
        ValueError: the name is taken or is no identifier, or the class does not do what its place asks for.
    """

    def add(cls: F) -> F:
        if name in (*FITTED, *VARIANTS, *ENTRY) or not name.isidentifier():
            raise ValueError(f"{name!r} cannot be the name of a fit; choose a free name of letters, digits and _.")
        wanted = {CALL: "prepare", HEADS: "forward", AROUND: "undo"}.get(getattr(cls, "place", ""))
        if wanted is None:
            raise ValueError(f"fit {name!r}: place must be one of {CALL}, {HEADS} and {AROUND}.")
        for method in (wanted, "check", "from_spec", "spec", "words"):
            if next(base for base in cls.__mro__ if method in vars(base)) in Fitted.__mro__:
                raise ValueError(f"fit {name!r}, which acts at the place {cls.place!r}, needs the method {method}.")
        cls.name = name
        FITTED[name] = cls
        return cls

    return add


def sentences(fits: Iterable[Fitted]) -> str:
    """What many layers have, for reports: one sentence for each kind of fit, with the number of its layers."""
    alike: dict[tuple[str, str], list[Fitted]] = {}
    for fit in fits:
        alike.setdefault((fit.name, fit.words()), []).append(fit)
    return " ".join(group[0].sentence(len(group)) for group in alike.values())
