"""Holds what the documentation says of a variant, in words. Nothing here changes what the variant computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class About:
    """What the command line, the site, the model cards and `describe` say of a variant.

    Attributes:
        summary: what the variant changes, in a few words.
        formula: the formula at full strength.
        paper: the paper, by words that find its entry in `publish/papers.bib`.
        fused: the exact fast form, in words.
        parameters_added: the number of new parameters per layer, in words.
        then: what the variant does to the heads after they are computed, in words; for example "the projection".
    """

    summary: str = ""
    formula: str = ""
    paper: str = ""
    fused: str = ""
    parameters_added: str = "none"
    then: str = ""
