"""A transformers that is newer than the tested ones is told in one line, once per process, and not refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hf_attn_swap import patch_model, tested
from hf_attn_swap.layer.swap import Swap
from tests import zoo


@pytest.fixture(autouse=True)
def nothing_told() -> Iterator[None]:
    """Each test is a process that has told nothing yet."""
    tested.tell_if_newer.cache_clear()
    yield
    tested.tell_if_newer.cache_clear()


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "hf_attn_swap"]


@pytest.mark.parametrize("version", ["5.999.0", "6.0.0", "5.999.0.dev0"])
def test_the_first_patch_tells_of_a_newer_version(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tested.transformers, "__version__", version)
    for _ in range(2):
        model = patch_model(zoo.build("bert"), "belief")
        assert any(isinstance(module, Swap) for module in model.modules())
    ((level, message),) = told(caplog)
    assert level == "WARNING"
    assert "\n" not in message
    for part in (version, tested.NEWEST_TRANSFORMERS, "hf-attn-swap doctor"):
        assert part in message


@pytest.mark.parametrize("version", [tested.NEWEST_TRANSFORMERS, tested.OLDEST_TRANSFORMERS])
def test_nothing_is_told_of_a_tested_version(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tested.transformers, "__version__", version)
    patch_model(zoo.build("bert"), "belief")
    assert not told(caplog)


def test_a_refusal_of_the_model_comes_after_the_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The newer version may be the reason of the refusal; a wrong name is not."""
    monkeypatch.setattr(tested.transformers, "__version__", "5.999.0")
    with pytest.raises(ValueError, match="unknown variant"):
        patch_model(zoo.build("bert"), "nothing")
    assert not told(caplog)
    with pytest.raises(ValueError, match="nothing can be swapped"):
        patch_model(zoo.build("bloom"), "belief")
    assert len(told(caplog)) == 1


def test_a_local_part_is_no_newer_version() -> None:
    assert not tested.is_newer("2.13.0+cpu", "2.13.0")
    assert tested.is_newer("2.13.1+cpu", "2.13.0")
    assert not tested.is_newer("2.13.0rc1", "2.13.0")
