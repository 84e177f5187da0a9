# SPDX-License-Identifier: Apache-2.0
"""What the demo found, as a table, a chart and a JSON file.

In: the finished stages. Out: `results.json`, `table.txt` and `chart.png` in the run folder, and the table on the
terminal. Costs about two seconds, for the chart.
"""

import json
from pathlib import Path
from typing import Any

from megatron_kd.demo.evaluation import TEACHER
from megatron_kd.demo.stages import Done, Stages
from megatron_kd.report.table import format_bytes, format_table

PRUNED, DEFAULT, DISTILLED = "pruned student", "healed, default loss", "healed, distilled"
LARGE_TOKENS, LARGE_VOCABULARY, LARGE_HIDDEN = 32_768, 201_088, 2_880


def memory_shapes(settings: Any) -> list[Any]:
    """The demo's own shape of a loss call, with SmolLM2's head, and if asked for a GPT-OSS-sized one."""
    import torch

    from megatron_kd.report.loss_memory import LossShape

    strip = settings.recipe.strip_tokens
    own = LossShape(settings.seq_length, 49_152, 576, settings.top_k, torch.float32, strip_tokens=strip)
    large = LossShape(LARGE_TOKENS, LARGE_VOCABULARY, LARGE_HIDDEN, settings.top_k)
    return [own, large] if settings.large_shape else [own]


def collect(stages: Stages, *, held_out: Done, default: Done, distilled: Done, memory: Done) -> dict[str, Any]:
    """The content of results.json."""
    return {
        "held_out": held_out.result,
        "training": {DEFAULT: default.result["curve"], DISTILLED: distilled.result["curve"]},
        "loss_memory": memory.result["shapes"],
        "stages": [
            {"name": stage.name, "seconds": stage.seconds, "reused": stage.reused, "settings": stage.settings}
            for stage in stages.done
        ],
    }


def publish(run_dir: Path, found: dict[str, Any]) -> None:
    """Write the three files and print the table."""
    from megatron_kd.report.charts import draw

    text = f"{fidelity_table(found)}\n\n{memory_table(found)}"
    (run_dir / "results.json").write_text(json.dumps(found, indent=1))
    (run_dir / "table.txt").write_text(text + "\n")
    draw(run_dir / "chart.png", found)
    print(f"\n{text}")


def fidelity_table(found: dict[str, Any]) -> str:
    """Students and teacher on held-out text, and what the table's columns mean."""
    rows = [
        [name, f"{figures['kl']:.3f}", f"{figures['agreement']:.1%}", f"{figures['perplexity']:.2f}"]
        for name in (PRUNED, DEFAULT, DISTILLED, TEACHER)
        for figures in [found["held_out"][name]]
    ]
    table = format_table(["held-out text", "KL to teacher", "same top token", "perplexity"], rows)
    return (
        f"{table}\nKL in nats over the whole vocabulary; mean of {found['held_out'][PRUNED]['positions']:,} positions."
    )


def memory_table(found: dict[str, Any]) -> str:
    """Peak memory of the loss, one row a shape."""
    names = list(found["loss_memory"][0]["bytes"])
    rows = [
        [shape["shape"], *(format_bytes(shape["bytes"][name]) for name in names)] for shape in found["loss_memory"]
    ]
    return format_table(["peak memory of the loss (counted)", *(name.replace("_", "-") for name in names)], rows)
