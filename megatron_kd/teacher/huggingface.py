# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face causal language model as a teacher: hidden states, output projection, real vocabulary, identity.

In: a model folder, hub name or GGUF file. Out: hidden states of batches of token sequences, and teacher rows through
`fused_linear_topk`. Costs the model's weights; the model's own [tokens, vocabulary] logits are made once, for at most
32 tokens, to prove that the projection done here is the model's.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_kd.cache.files import digest_bytes, digest_file
from megatron_kd.cache.manifest import tokenizer_identity
from megatron_kd.loss import TeacherRows, VocabShard, fused_linear_topk
from megatron_kd.loss.matmul import logits_into
from megatron_kd.teacher.errors import TeacherError, implausible_if_not_finite

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 32
_DTYPES = ("float32", "bfloat16", "float16", "float64")


class HuggingFaceTeacher:
    """A `Teacher` on one process. Use `load`."""

    writes, replica, alone = True, (0, 1), True

    def __init__(self, model: Any, *, vocab_real: int, tokenizer: dict[str, Any] | None, identity: dict[str, Any]):
        self.model, self.vocab_real, self.tokenizer, self.identity = model.eval(), vocab_real, tokenizer, identity
        config = model.config.get_text_config()
        self.max_context: int | None = getattr(config, "max_position_embeddings", None)
        head = model.get_output_embeddings()
        self.name = f"{identity['repo']} ({type(model).__name__})"
        if head is None or not hasattr(head, "weight"):
            raise TeacherError(f"{self.name} has no output embedding; a causal language model is needed")
        self._weight, self._bias = head.weight.detach(), getattr(head, "bias", None)
        if self._weight.is_meta:
            raise TeacherError(
                f"{self.name}: the device map leaves the output projection on disk or in main memory; it is needed "
                "for every strip of tokens, so give it a device"
            )
        embedding = model.get_input_embeddings().weight
        self._first_device = self.device if embedding.is_meta else embedding.device
        self.vocab_padded = self._weight.shape[0]
        if vocab_real > self.vocab_padded:
            raise TeacherError(
                f"the tokenizer has ids up to {vocab_real - 1}, the output projection of {self.name} has "
                f"{self.vocab_padded} rows; they do not belong together"
            )
        self._transform = _logit_transform(config)
        self._check_projection()

    @classmethod
    def load(
        cls,
        teacher: str | Path,
        *,
        gguf_file: str | None = None,
        revision: str | None = None,
        dtype: str = "float32",
        device: str | None = None,
        device_map: str | dict[str, Any] | None = None,
        tokenizer: Any = None,
        vocab_size: int | None = None,
    ) -> "HuggingFaceTeacher":
        """Load a teacher.

        Args:
            teacher: folder, or name on the hub.
            gguf_file: name of a GGUF file in it.
            revision: of a hub name.
            dtype: dtype of the weights and of the forward pass.
            device: default CUDA if there is any.
            device_map: instead of a device, how accelerate spreads the model over the GPUs of this machine: `auto`,
                `balanced`, `sequential`, or places by module. What it leaves on disk or in main memory is loaded
                again for every pass.
            tokenizer: folder, name, or tokenizer object; default the teacher's own.
            vocab_size: real vocabulary; only needed when there is no tokenizer.

        Raises:
            TeacherError: missing files, missing weights, a vocabulary that does not fit.
        """
        import transformers

        source = model_source(teacher)
        if device is not None and device_map is not None:
            raise TeacherError(f"device {device!r} and a device map were given; a model has one or the other")
        if dtype not in _DTYPES:
            raise TeacherError(f"dtype {dtype!r} is not known; use one of {', '.join(_DTYPES)}")
        options = {name: value for name, value in (("gguf_file", gguf_file), ("revision", revision)) if value}
        logger.info("loading teacher %s", source)
        try:
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                source, dtype=getattr(torch, dtype), output_loading_info=True, device_map=device_map, **options
            )
        except (OSError, ValueError) as error:  # what transformers says of models that are not there or unknown to it
            raise TeacherError(f"the teacher {source} cannot be loaded: {error}") from error
        missing = sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"]))
        if missing:
            raise TeacherError(
                f"{source} lacks {len(missing)} of the model's weights ({', '.join(missing[:3])}, ...): they would be "
                "random. Use a complete checkpoint"
            )
        if tokenizer is None and vocab_size is None:
            tokenizer = source
        known = load_tokenizer_identity(tokenizer, options if tokenizer is source else {})
        real = vocab_size if vocab_size is not None else known["vocab_size"]
        folder, found = model_files(source, gguf_file, revision)
        identity = {
            "repo": Path(source).name if Path(source).is_dir() else source,
            "revision": found,
            "weights": weights_digest(folder, gguf_file),
            "dtype": dtype,
            "engine": "transformers",
            "version": f"{transformers.__version__}, torch {torch.__version__}",
        }
        if device_map is None:
            model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        return cls(model, vocab_real=real, tokenizer=known, identity=identity)

    @property
    def device(self) -> torch.device:
        """Where the output weight is."""
        return self._weight.device

    def padded(self, sequences: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids int64 [B, longest], padded on the right, and the mask of those that are none."""
        longest = max(map(len, sequences))
        tokens = np.zeros((len(sequences), longest), np.int64)
        mask = np.zeros((len(sequences), longest), np.int64)
        for row, sequence in enumerate(sequences):
            tokens[row, : len(sequence)], mask[row, : len(sequence)] = sequence, 1
        return torch.from_numpy(tokens).to(self._first_device), torch.from_numpy(mask).to(self._first_device)

    @torch.no_grad()
    def hidden(self, sequences: Sequence[np.ndarray]) -> torch.Tensor:
        """Hidden states after the final norm, [B, longest, H]; positions beyond a sequence's end are meaningless.

        Sequences are padded on the right and masked, so no real position attends to padding.
        """
        tokens, mask = self.padded(sequences)
        return self.model.base_model(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state

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
        """See `Teacher.rows`."""
        hidden = self.hidden(sequences)
        chosen = np.zeros(hidden.shape[:2], bool)
        for row, sequence in enumerate(sequences):
            chosen[row, : len(sequence)] = True if wanted is None else wanted[row]
        hidden = hidden[torch.from_numpy(chosen).to(hidden.device)].to(self.device)
        if labels is not None:
            labels = torch.from_numpy(np.concatenate(labels).astype(np.int64)).to(self.device)
        with implausible_if_not_finite(self.name, self.identity["dtype"]):
            return fused_linear_topk(
                hidden,
                self._weight,
                shard=VocabShard(0, self.vocab_padded, self.vocab_real),
                top_k=top_k,
                temperatures=temperatures,
                strip_tokens=strip_tokens,
                bias=self._bias,
                transform=self._transform,
                labels=labels,
            )

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Teacher`; without what a device map left elsewhere."""
        return ((name, parameter) for name, parameter in self.model.named_parameters() if not parameter.is_meta)

    def agree(self, value: Any) -> Any:
        """See `Teacher`."""
        return value

    def anyone(self, flag: bool) -> bool:
        """See `Teacher`."""
        return flag

    @torch.no_grad()
    def _check_projection(self) -> None:
        """Compare our logits with the model's own, so that an unknown scaling or cap is refused and not distilled."""
        count = min(_PROBE_TOKENS, self.max_context or _PROBE_TOKENS)
        tokens = np.arange(count) * 7919 % self.vocab_real
        hidden = self.hidden([tokens])[0].to(self.device)
        ours = hidden.new_empty(count, self.vocab_padded, dtype=torch.promote_types(hidden.dtype, torch.float32))
        logits_into(ours, hidden, self._weight, ours.dtype)
        if self._bias is not None:
            ours += self._bias.float()
        if self._transform is not None:
            ours = self._transform(ours)
        batch, _ = self.padded([tokens])
        theirs = self.model(input_ids=batch, use_cache=False).logits[0].float().to(self.device)
        error, size = float((ours - theirs).abs().max()), float(theirs.abs().max())
        allowed = max(1e-4, 4 * torch.finfo(hidden.dtype).eps) * size
        if not error <= allowed:
            raise TeacherError(
                f"{self.name}: its logits are not output weight x hidden state, soft-capped or scaled as its config "
                f"says (largest difference {error:.3g} of {size:.3g}); this architecture does something to them that "
                "is not supported yet"
            )


def weights_digest(
    folder: Path, gguf_file: str | None = None, patterns: Sequence[str] = ("*.safetensors", "pytorch_model*.bin")
) -> str:
    """Digest of the weight files' content, in the order of their names: those of the first pattern that finds any."""
    found = (sorted(folder.glob(pattern)) for pattern in ([gguf_file] if gguf_file else patterns))
    files = next((files for files in found if files), [])
    if not files:
        raise TeacherError(f"{folder} holds no {' or '.join(patterns)}: the teacher's weights cannot be identified")
    return digest_bytes("".join(digest_file(file) for file in files).encode())


def model_source(teacher: str | Path) -> str:
    """The name to load; a path that does not exist is an error here, before anything is downloaded."""
    text = str(teacher)
    if Path(text).expanduser().is_dir():
        return str(Path(text).expanduser())
    if isinstance(teacher, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise TeacherError(
            f"the teacher's folder {text} does not exist; give a folder or a name on the Hugging Face hub"
        )
    return text


def model_files(source: str, gguf_file: str | None, revision: str | None) -> tuple[Path, str | None]:
    """Folder with the loaded files, and the revision if it came from the hub."""
    if Path(source).is_dir():
        return Path(source), None
    from transformers.utils import cached_file

    folder = Path(cached_file(source, gguf_file or "config.json", revision=revision)).parent
    return folder, folder.name


def load_tokenizer_identity(tokenizer: Any, options: dict[str, str] | None = None) -> dict[str, Any] | None:
    """Identity of a tokenizer: an object, or a folder or name to load with `options`; None for None."""
    if tokenizer is None:
        return None
    if not isinstance(tokenizer, str | Path):
        return tokenizer_identity(tokenizer)
    import transformers

    try:
        return tokenizer_identity(transformers.AutoTokenizer.from_pretrained(str(tokenizer), **(options or {})))
    except (OSError, ValueError) as error:
        raise TeacherError(
            f"no tokenizer can be loaded from {tokenizer} ({str(error).splitlines()[0]}). Name the one the corpus was "
            "made with (tokenizer=, --tokenizer), or state the real vocabulary (vocab_size=, --vocab-size)"
        ) from error


def _logit_transform(config: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What the model does to its logits, by the config keys that Gemma, Granite and Cohere use; works in place."""
    cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    factor = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    if not cap and factor == 1.0:
        return None

    def transform(logits: torch.Tensor) -> torch.Tensor:
        logits *= factor
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    return transform
