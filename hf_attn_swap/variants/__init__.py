"""Holds one file per variant. Importing this package imports every file, and so registers every variant."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
