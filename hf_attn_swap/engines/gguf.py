"""Turns an exported folder into a file for llama.cpp, by llama.cpp's own converter."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

CONVERTER = "convert_hf_to_gguf.py"
TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # the converter's own choice is 16 bits for all


def find_converter(llama_cpp: Path | None) -> Path:
    """The converter of llama.cpp.

    Args:
        llama_cpp: the folder with llama.cpp's sources, or the converter itself; None looks for it among the programs.

    Raises:
        ValueError: it is not there.
    """
    if llama_cpp is None:
        there = shutil.which(CONVERTER)
        if there is None:
            raise ValueError(f"{CONVERTER} is not among the programs; name the folder of llama.cpp with --llama-cpp.")
        return Path(there)
    path = llama_cpp / CONVERTER if llama_cpp.is_dir() else llama_cpp
    if path.name != CONVERTER or not path.is_file():
        raise ValueError(f"{llama_cpp} has no {CONVERTER}; name the folder with llama.cpp's sources.")
    return path


def write_gguf(folder: Path, file: Path, converter: Path) -> None:
    """Write a GGUF file from a folder of transformers, in the precision of its weights.

    Args:
        folder: a folder that `export` wrote.
        file: the file to write; it must not exist.
        converter: llama.cpp's converter.

    Raises:
        ValueError: the file exists, llama.cpp does not have the precision of the weights, or the converter stops.
    """
    if file.exists():
        raise ValueError(f"{file} exists; name a file that does not exist.")
    dtype = json.loads((folder / "config.json").read_text("utf-8"))["dtype"]
    if dtype not in TYPES:
        raise ValueError(
            f"{folder} is whole, but its {dtype} is no precision of llama.cpp: export with --dtype float32."
        )
    kind = TYPES[dtype]
    command = [sys.executable, str(converter), str(folder), "--outfile", str(file), "--outtype", kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        file.unlink(missing_ok=True)
        last = done.stderr.strip().splitlines()[-1:] or ["no word of why"]
        raise ValueError(
            f"{folder} is whole, but llama.cpp's converter stopped: {last[0]} (it needs the packages of llama.cpp's "
            f"requirements); run it by hand: python {converter} {folder} --outfile {file} --outtype {kind}"
        )
