"""One swapped layer: its variants and fits, what it computes, and the names under which a user asks for it."""

from importlib import import_module

# Every file that registers a fit, in the order in which a conversion makes them, and fits act and are described.
for _name in ("value_scale", "smoothing", "calibration"):
    import_module(f"{__name__}.{_name}")
