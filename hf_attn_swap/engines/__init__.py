"""Lets other programs run what this package makes: `export` writes a folder of a class that they know."""
