"""The configurations that ship with the package: YAML files of a recipe's arguments, in one folder per recipe."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
SUFFIXES = (".yaml", ".yml")


def shipped(recipe: str | None = None) -> dict[str, Path]:
    """The files of the configurations by name: those of one recipe, such as "text_classification", or all of them."""
    return {path.stem: path for path in sorted(FOLDER.glob(f"{recipe or '*'}/*.yaml"))}


def find(name: str, recipe: str | None = None, relative_to: Path | None = None) -> Path:
    """The file of a configuration.

    Args:
        name: the name of a configuration that ships, such as "ag_news", or the path of a file that ends in .yaml.
        recipe: look among the configurations of this recipe only.
        relative_to: the folder in which a path starts; the current folder if None.

    Raises:
        ValueError: there is no such file, or no configuration has this name.
    """
    if name.endswith(SUFFIXES):
        path = (relative_to or Path()) / name
        if path.is_file():
            return path
        problem = f"there is no file {str(path)!r}"
    elif name in (known := shipped(recipe)):
        return known[name]
    else:
        problem = f"no configuration is called {name!r}"
    whose = f" of {recipe}" if recipe else ""
    raise ValueError(f"{problem}; the configurations{whose} that ship are {', '.join(shipped(recipe))}.")


def first_line(path: Path) -> str:
    """What a configuration is for: its first line, a comment."""
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
