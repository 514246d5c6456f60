"""The Hugging Face hub, with one clear sentence for each way it can say no.

Whether it answers is asked once, with a short timeout: the hub's own client would repeat every request for half a
minute. If it does not, what was fetched before is used.
"""

from __future__ import annotations

import logging
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from samebits.checkpoint import INDEX
from samebits.errors import ModelError

_TIMEOUT_S = 10.0


def reach(model: str) -> bool:
    """Return whether the hub answers and has this model; ``False`` if it does not answer.

    Raises
    ------
    ModelError
        It answers that there is no such model, or that this user may not have it.
    """
    try:
        HfApi().model_info(model, timeout=_TIMEOUT_S)
    except GatedRepoError:
        problem = f"its owner asks for consent first: accept at https://huggingface.co/{model}, then `hf auth login`"
        raise ModelError(model=model, problem=problem) from None
    except RepositoryNotFoundError:
        problem = "neither a folder here nor a model on the hub (or a private one: `hf auth login` first)"
        raise ModelError(model=model, problem=problem) from None
    except HFValidationError:
        raise ModelError(model=model, problem="neither a folder here nor a well-formed hub id") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if 400 <= status < 500 and status != 429:
            raise ModelError(model=model, problem=f"the hub refuses: {str(error).splitlines()[0]}") from None
        return False
    except Exception:
        # Offline mode, no network, a broken proxy: each is another library's class, and all mean that nobody answered.
        return False
    return True


def small_files(model: str, online: bool) -> Path:
    """Fetch the JSON files that say what the model is, and return the folder they are in.

    Raises
    ------
    ModelError
        The model is not a diffusers pipeline, or the hub does not answer and nothing was fetched before.
    """
    for name in ("vae/config.json", "transformer/config.json", "scheduler/scheduler_config.json", INDEX):
        try:
            path = Path(hf_hub_download(model, name, local_files_only=not online))
        except LocalEntryNotFoundError:
            raise _unreachable(model) from None
        except EntryNotFoundError:
            problem = f"has no {name}: it is not a diffusers pipeline of a kind that samebits knows"
            raise ModelError(model=model, problem=problem) from None
        except (HfHubHTTPError, OSError) as error:
            raise ModelError(model=model, problem=f"{name} could not be fetched ({_first_line(error)})") from None
    return path.parent


def download(model: str, online: bool) -> Path:
    """Fetch what is still missing of the pipeline, and return its folder.

    Raises
    ------
    ModelError
        The hub went away, or the model was never fetched completely.
    """
    from diffusers import DiffusionPipeline

    try:
        return Path(DiffusionPipeline.download(model, use_safetensors=True, local_files_only=not online))
    except LocalEntryNotFoundError:
        raise _unreachable(model) from None
    except Exception as error:
        logging.getLogger(__name__).debug("download failed", exc_info=True)
        raise ModelError(model=model, problem=f"could not be fetched ({_first_line(error)})") from error


def _unreachable(model: str) -> ModelError:
    problem = "no folder here has this name, the hub cannot be reached, and it was not fetched before"
    return ModelError(model=model, problem=problem)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
