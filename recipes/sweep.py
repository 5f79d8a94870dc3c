r"""Runs one recipe many times, as one YAML file lists; several runs can run at a time.

    python recipes/sweep.py recipes/configs/sweep_ag_news.yaml --jobs 2 -- \
        --dataset_name data/ag_news --dataset_card_name fancyzhx/ag_news --card_name minilm-ag-news

    recipe: text_classification.py          # next to this file
    config: ag_news                         # a configuration that ships, or a YAML file next to this one
    runs:                                   # an entry is one run, or one run per combination under `grid`
      - {variant: belief, seeds: [0, 1, 2]}
      - {variant: modern_hopfield, stages: [calibrate, fine_tune], label: "alpha-{index}",
         grid: {options: ['{"alpha": 0.0}', '{"alpha": 0.5}']}}

The controls run first. Then every seed of every run runs by itself. Then every run is called once more with all its
seeds, to write its record; seeds that are finished are not run again. The output of a run goes to `<out>/<run>.log`. If
a run fails, the other runs go on, and the failed run is named at the end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from hf_attn_swap import configurations

Run = dict[str, Any]
NAMED = ("label", "output_dir", "card_name")
OF_VARIANT = ("variant", "options", "layers", "modules", "label", "stages")


def expand(run: Run) -> Iterator[Run]:
    """One run per combination of the grid's values. Its names may hold `{index}`, `{number}` and `{variant}`."""
    grid = run.get("grid", {})
    fixed = {name: value for name, value in run.items() if name != "grid"}
    for index, values in enumerate(itertools.product(*grid.values())):
        chosen = {**fixed, **dict(zip(grid, values, strict=True))}
        told = {"index": index, "number": index + 1, "variant": chosen["variant"]}
        named = {name: chosen[name].format(**told) for name in NAMED if name in chosen}
        yield {**chosen, **named}


def control(run: Run) -> Run:
    """The softmax run that a run is compared with: the same arguments without those of the variant."""
    return {**{name: value for name, value in run.items() if not name.startswith(OF_VARIANT)}, "variant": "softmax"}


def words(run: Run) -> list[str]:
    """The arguments of a run as command-line options."""
    arguments = []
    for name, value in run.items():
        values = value if isinstance(value, list) else [value]
        arguments += [f"--{name}", *(json.dumps(item) if isinstance(item, dict) else str(item) for item in values)]
    return arguments


def name_of(run: Run) -> str:
    """The name of a run's log file."""
    where = "".join(f"{part}-" for part in Path(run.get("output_dir", "")).parts[-2:])
    return f"{where}{run.get('label') or run['variant']}-{'-'.join(map(str, run.get('seeds', [0])))}"


def call(command: list[str], log: Path, threads: int) -> bool:
    """Run a command and append its output to the log. True if the command succeeds."""
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ, "TOKENIZERS_PARALLELISM": "false"}
    with log.open("a", encoding="utf-8") as lines:
        return not subprocess.run(
            command, stdout=lines, stderr=subprocess.STDOUT, env=environment, check=False
        ).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path)
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="Runs at a time. Each gets its share of the cores, or OMP_NUM_THREADS threads, if that is set.",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/logs"), help="Folder of the logs.")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments, rest = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    sweep = yaml.safe_load(arguments.sweep.read_text(encoding="utf-8"))
    recipe = [
        sys.executable,
        str(Path(__file__).parent / sweep["recipe"]),
        str(configurations.find(sweep["config"], relative_to=arguments.sweep.parent)),
    ]
    runs = [run for template in sweep["runs"] for run in expand(template)]
    arguments.out.mkdir(parents=True, exist_ok=True)
    threads = max(1, (os.cpu_count() or 1) // arguments.jobs)
    single = [{**run, "seeds": [seed]} for run in runs for seed in run.get("seeds", [0])]
    controls = list({repr(control(run)): control(run) for run in single}.values())
    phases = [controls, single, runs]
    failed: list[str] = []
    with tqdm(total=sum(map(len, phases)), desc="sweep", unit="run") as bar:
        for phase in phases:
            with ThreadPoolExecutor(arguments.jobs) as pool:
                names = [name_of(run) for run in phase]
                commands = [[*recipe, *words(run), *rest] for run in phase]
                logs = [arguments.out / f"{name}.log" for name in names]
                for name, well in zip(names, pool.map(call, commands, logs, itertools.repeat(threads)), strict=True):
                    bar.update()
                    if not well:
                        failed.append(name)
                        tqdm.write(f"{name} failed; see {arguments.out / name}.log")
    if failed:
        sys.exit(f"{len(failed)} of {bar.total} failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
