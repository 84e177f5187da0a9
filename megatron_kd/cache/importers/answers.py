# SPDX-License-Identifier: Apache-2.0
"""The shape of a line that `jsonl` reads, as types that msgspec parses to; other keys are skipped unread."""

import msgspec

Scalar = str | int | float | None


class Entry(msgspec.Struct, gc=False):
    """What vLLM says of one id."""

    logprob: float
    rank: int | None = None


Triple = tuple[float | None, int, str | None]


class Info(msgspec.Struct):
    """SGLang's `meta_info`."""

    input_token_logprobs: list[Triple]
    input_top_logprobs: list[list[Triple] | None]
    prompt_tokens: int | None = None


class Body(msgspec.Struct):
    """An answer, or what is around it."""

    response: "Body | None" = None
    body: "Body | None" = None
    choices: "list[Body] | None" = None
    meta_info: Info | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, Entry | float] | None] | None = None
    model: Scalar = None
    logprobs_mode: Scalar = None
    temperature: Scalar = None
    vllm_version: Scalar = None
    version: Scalar = None


_DECODER = msgspec.json.Decoder(Body)


def parse(line: memoryview) -> Body:
    """One line.

    Raises:
        ValueError: it is no JSON, or of another shape.
    """
    try:
        return _DECODER.decode(line)
    except msgspec.DecodeError:
        text = bytes(line)
        if b"-Infinity" not in text:
            raise
        return _DECODER.decode(text.replace(b"-Infinity", b"-1e300"))  # no JSON, but common; float32 makes it -inf
