# SPDX-License-Identifier: Apache-2.0
"""A model in vLLM as the teacher. `_start` is all that touches the engine.

Tested against vLLM 0.32 on CPU, whose cache is that of transformers, and on wrong answers of the documented structure
(`RequestOutput`, `FlatLogprobs`); never on a GPU. There, try `cache build --engine vllm --limit 20` first, then `cache
verify --level teacher`, which computes some units again with transformers.

In: token sequences. Out: teacher rows. Each sequence is one request for the top K after every token of its prompt. The
user installs vLLM, in a version whose `SamplingParams` know `flat_logprobs`.

| setting                     | why |
|-----------------------------|-----|
| prompt_logprobs=K           | the rows |
| max_logprobs=K              | the engine's limit is 20 otherwise, and it refuses more |
| logprobs_mode=raw_logprobs  | before temperature, penalties and processors: the model's own distribution |
| enable_prefix_caching=False | rows of cached positions are missing, or depend on what other requests came before |
| max_num_batched_tokens=2048 | the logits of all tokens of a step are kept, 6 bytes times the vocabulary each (2.5 |
|                             | GB at 201,088), unknown to the engine's memory profile; longer prompts go in chunks |
| gpu_memory_utilization=0.8  | room for these logits |
| max_model_len               | the model's context, unless given; a request has two tokens more than rows |
| dtype                       | stated, since `auto` is the checkpoint's; it is part of the cache's identity |
| flat_logprobs, detokenize   | lists of numbers (True, False), not an object with a string for each id |

The temperature of a request does not touch its prompt's log-probabilities, so the cache serves T = 1 only.

One token is added to each sequence, whose row describes the last position. A request without the right ids, with
fewer rows or entries than asked for, or with ids of the vocabulary's padding is refused. The mass outside the K is
derived as 1 - sum(p), exact to 1e-6; the vocabulary's padding, which the engine's softmax includes, counts as outside.
The build's gate applies: loss on the corpus, top-1 not constant.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_kd.cache.errors import ImportRefused
from megatron_kd.cache.importers.records import RESOLUTION, make_record, with_tail
from megatron_kd.loss import TeacherRows
from megatron_kd.teacher.errors import TeacherError
from megatron_kd.teacher.huggingface import load_tokenizer_identity, model_files, model_source, weights_digest

logger = logging.getLogger(__name__)

_FIXED = {"logprobs_mode": "raw_logprobs", "enable_prefix_caching": False}
_DEFAULTS = {"max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.8, "seed": 0}
_MORE_TOKENS = 2
"""Tokens of a request beyond its rows: the one that is added, and the one that the engine generates."""

Ask = Callable[[Sequence[np.ndarray], int], Sequence[Any]]
"""Prompts and K to the engine's answers, in the same order."""


class VllmTeacher:
    """A `Teacher` on one process, which may drive several GPUs (`tensor_parallel_size`). Use `load`.

    Args:
        ask: the engine.
        max_context: tokens of a request with rows.
        identity, tokenizer, vocab_real, vocab_padded: see `Teacher`.
    """

    writes, replica, alone = True, (0, 1), True

    def __init__(
        self,
        ask: Ask,
        *,
        vocab_real: int,
        vocab_padded: int,
        max_context: int | None,
        tokenizer: dict[str, Any] | None,
        identity: dict[str, Any],
    ):
        self._ask, self.vocab_real, self.vocab_padded = ask, vocab_real, vocab_padded
        self.max_context, self.tokenizer = max_context, tokenizer
        self.identity = identity | {"tail": f"derived from f32 values, at least {RESOLUTION['f32']:g}"}
        self.name = f"{identity['repo']} (vLLM)"

    @classmethod
    def load(
        cls,
        teacher: str | Path,
        *,
        top_k: int,
        revision: str | None = None,
        dtype: str = "bfloat16",
        settings: dict[str, Any] | None = None,
        tokenizer: Any = None,
        vocab_size: int | None = None,
    ) -> "VllmTeacher":
        """Start an engine.

        Args:
            teacher: folder, or name on the hub.
            top_k: entries a row.
            revision: of a hub name.
            dtype: of the forward pass.
            settings: of `vllm.LLM`, such as `tensor_parallel_size`.
            tokenizer: folder, name, or tokenizer object; default the teacher's own.
            vocab_size: real vocabulary; only needed when there is no tokenizer.

        Raises:
            TeacherError: vLLM is not installed; a setting that would make wrong rows; a vocabulary that does not fit.
        """
        import transformers

        source = model_source(teacher)
        settings = _DEFAULTS | (settings or {})
        fixed = _FIXED | {"max_logprobs": top_k}
        if wrong := sorted(name for name in fixed if settings.get(name, fixed[name]) != fixed[name]):
            raise TeacherError(
                f"model.{wrong[0]}={settings[wrong[0]]} would make rows that are wrong or missing; it has to be "
                f"{fixed[wrong[0]]}"
            )
        options = {"revision": revision} if revision else {}
        config = transformers.AutoConfig.from_pretrained(source, **options).get_text_config()
        longest = settings.setdefault("max_model_len", getattr(config, "max_position_embeddings", None))
        known = load_tokenizer_identity(source if tokenizer is None and vocab_size is None else tokenizer, options)
        real = vocab_size if vocab_size is not None else known["vocab_size"]
        if not top_k <= real <= config.vocab_size:
            raise TeacherError(
                f"the tokenizer has ids up to {real - 1}, {source} a vocabulary of {config.vocab_size}, and top_k is "
                f"{top_k}; these do not go together"
            )
        folder, found = model_files(source, None, revision)
        digest = weights_digest(folder)
        ask, version = _start(source, settings | fixed | options | {"dtype": dtype})
        identity = {
            "repo": Path(source).name if Path(source).is_dir() else source,
            "revision": found,
            "weights": digest,
            "dtype": dtype,
            "engine": "vllm",
            "version": version,
            "settings": {name: str(value) for name, value in sorted((settings | fixed).items())},
        }
        return cls(
            ask,
            vocab_real=real,
            vocab_padded=config.vocab_size,
            max_context=None if longest is None else longest - _MORE_TOKENS,
            tokenizer=known,
            identity=identity,
        )

    def rows(
        self,
        sequences: Sequence[np.ndarray],
        *,
        top_k: int,
        wanted: Sequence[np.ndarray] | None = None,
        temperatures: Sequence[float] = (),
        strip_tokens: int | None = None,
        labels: Sequence[np.ndarray] | None = None,
    ) -> TeacherRows:
        """See `Teacher.rows`; `strip_tokens` is the engine's affair, `labels` are the tokens that follow.

        Raises:
            TeacherError: an answer is not complete or not of this prompt; a temperature other than 1.
        """
        if temperatures:
            raise TeacherError(
                f"{self.name} tells the top {top_k} at temperature 1 only; temperatures {list(temperatures)} need the "
                "mass of all other ids at theirs (--engine transformers or megatron)"
            )
        added = [0] * len(sequences) if labels is None else [int(own[-1]) for own in labels]
        prompts = [np.append(own, token) for own, token in zip(sequences, added, strict=True)]
        answers = self._ask(prompts, top_k)
        if len(answers) != len(prompts):
            raise TeacherError(f"{self.name} gave {len(answers)} answers to {len(prompts)} requests")
        parts = [
            [plane if wanted is None else plane[wanted[i]] for plane in self._rows(prompt, answers[i], top_k)]
            for i, prompt in enumerate(prompts)
        ]
        ids, logprobs, log_tail, following = (torch.from_numpy(np.concatenate(x)) for x in zip(*parts, strict=True))
        nothing = log_tail.new_empty(len(log_tail), 0)
        return TeacherRows(ids, logprobs, log_tail, nothing, None if labels is None else following)

    def _rows(self, prompt: np.ndarray, answer: Any, top_k: int) -> tuple[np.ndarray, ...]:
        """Ids, log-probabilities, log tail, and log-probability of the next token, for all positions but the last."""
        where = f"{self.name}, a prompt of {len(prompt)} tokens"
        if list(answer.prompt_token_ids) != prompt.tolist():
            raise TeacherError(f"{where}: the answer is to another prompt; the engine must take token ids as they are")
        found = answer.prompt_logprobs
        if found is None or len(found) != len(prompt):
            rows = "no" if found is None else len(found)
            raise TeacherError(f"{where}: {rows} rows came back; prefix caching must be off, and the answer whole")
        counts = np.subtract(found.end_indices, found.start_indices)[1:]
        if (counts != top_k + 1).any():
            row = int(np.argmax(counts != top_k + 1))
            raise TeacherError(
                f"{where}: row {row} has {counts[row]} entries, expected the next token and the {top_k} most likely "
                "(model.max_logprobs)"
            )
        first = found.start_indices[1]
        ids = np.array(found.token_ids[first:], np.int64).reshape(-1, top_k + 1)
        values = np.array(found.logprobs[first:], np.float32).reshape(ids.shape)
        if not np.array_equal(ids[:, 0], prompt[1:]):
            raise TeacherError(f"{where}: a row does not begin with the token that follows")
        if ids.max() >= self.vocab_real:
            raise TeacherError(
                f"{where}: id {ids.max()} is among the most likely, the tokenizer has {self.vocab_real}: the padding "
                "of the vocabulary was never trained, so something is wrong with the weights"
            )
        try:
            record = make_record(where, None, ids[:, 1:], values[:, 1:])
            logprobs, log_tail = with_tail(record, "f32")
        except ImportRefused as error:
            raise TeacherError(str(error)) from error
        return record.ids, logprobs.astype(np.float32), log_tail.astype(np.float32), values[:, 0]

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """None: they are the engine's."""
        return iter(())

    def agree(self, value: Any) -> Any:
        """See `Teacher`."""
        return value

    def anyone(self, flag: bool) -> bool:
        """See `Teacher`."""
        return flag


def _start(source: str, settings: dict[str, Any]) -> tuple[Ask, str]:
    """Start vLLM: what asks it, and its version."""
    try:
        import vllm
    except ImportError as error:
        raise TeacherError(
            "vLLM is not installed here; install it as its documentation says for your GPUs, in an environment that "
            "has megatron-kd too"
        ) from error
    if not hasattr(vllm.SamplingParams(), "flat_logprobs"):
        raise TeacherError(f"vLLM {vllm.__version__} has no flat_logprobs; use a later version")
    engine = vllm.LLM(model=source, **settings)

    def ask(prompts: Sequence[np.ndarray], top_k: int) -> Sequence[Any]:
        sampling = vllm.SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=top_k, flat_logprobs=True, detokenize=False
        )
        requests = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        return engine.generate(requests, sampling, use_tqdm=False)

    return ask, vllm.__version__
