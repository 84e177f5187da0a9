# SPDX-License-Identifier: Apache-2.0
"""Whether a model named by its place on the Hugging Face hub can be had, before anything is loaded.

In: a name. Out: nothing, or an error within seconds: without network the hub's own client tries again for a minute and
more. Imports neither torch nor transformers.
"""

from pathlib import Path

from megatron_kd.errors import ConfigError

_TIMEOUT_S = 8


def check_on_hub(what: str, name: str, revision: str | None = None) -> None:
    """The hub's cache on this machine has the model's config.json, or the hub itself has the model.

    Args:
        what: what the name is of, as the user wrote it: "--teacher".
        name: OWNER/NAME, or a folder, of which nothing is said here.
        revision: branch, tag or commit.

    Raises:
        ConfigError: neither has it.
    """
    if Path(name).expanduser().exists():
        return
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    cache = f"the hub's cache ({constants.HF_HUB_CACHE})"
    at = f" at revision {revision}" if revision else ""
    try:
        if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            return
        HfApi().model_info(name, revision=revision, timeout=_TIMEOUT_S)
    except HFValidationError:
        why = "and no name on the Hugging Face hub, which would be OWNER/NAME"
    except GatedRepoError:
        why = "and on the hub its access is restricted: ask for it on the model's page, then export HF_TOKEN"
    except RevisionNotFoundError:
        why = f"and on the hub it has no revision {revision}"
    except RepositoryNotFoundError:
        why = "and the hub has no such model, or shows it only with a token: export HF_TOKEN"
    except OfflineModeIsEnabled:
        why = f"{cache} does not have it{at}, and HF_HUB_OFFLINE forbids asking the hub"
    except Exception as error:  # the client of the hub's client raises many kinds
        why = (
            f"{cache} does not have it{at}, and {constants.ENDPOINT} cannot be reached from here ({error}). Give a "
            "local folder, or fill the cache (HF_HOME) where the hub is reached"
        )
    else:
        return
    raise ConfigError(f"{what} {name}: no such folder here, {why}.")
