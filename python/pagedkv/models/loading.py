"""load_model: from a configuration and a stream of tensors to a model, strictly; random_model,
shape_model and count_weights: from a configuration alone.

Every tensor of the checkpoint is used, known to be derived, or an error that names it; every
parameter is filled, or an error names the tensors that it lacks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping

import torch

from pagedkv.models.config import ModelConfig
from pagedkv.models.kv_scales import KVScaleReader
from pagedkv.models.parameters import Parameter, Parameters, Split
from pagedkv.models.registry import CausalLM, family_of, family_of_architecture

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Memory for every position is taken at once, so a context beyond this must be asked for.
_LONGEST_BY_DEFAULT = 2**20
_SHOWN = 10


@torch.inference_mode()
def load_model(
    config: Mapping[str, object],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    max_model_len: int | None = None,
) -> CausalLM:
    """Build the model that config describes from a checkpoint's tensors.

    Args:
        config: a config.json. tensors: (Hugging Face name, tensor), in any order.
        dtype: of weights and activations; float32, bfloat16 or float16.
        max_model_len: tokens of the longest sequence, at most ModelConfig.longest_context;
            max_position_embeddings if None, which must then be at most 2**20. Rotary scaling of
            the kinds dynamic and longrope depends on it.

    Raises:
        ValueError: an unsupported architecture, dtype or length; tensors that are missing, not
            known, or of another shape, all of them named; or wrong scales of an fp8 cache.
    """
    model, parameters = _build(config, dtype, torch.device(device), max_model_len)
    _load(model, parameters, tensors)
    parameters.finish()
    return model


@torch.inference_mode()
def random_model(
    config: Mapping[str, object],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    max_model_len: int | None = None,
) -> CausalLM:
    """The model that config describes with random weights, the same each time on one kind of
    device: for measurements, which need no checkpoint. Arguments and errors: as load_model.
    """
    model, parameters = _build(config, dtype, torch.device(device), max_model_len)
    parameters.fill(seed=0)
    parameters.finish()
    return model


@torch.inference_mode()
def shape_model(
    config: Mapping[str, object] | ModelConfig,
    *,
    dtype: torch.dtype,
    runs_on: torch.device | str = "cuda",
    max_model_len: int | None = None,
) -> CausalLM:
    """The model that config describes on the meta device: it computes shapes, takes no memory, and
    shows what one with weights would take. Arguments and errors: as load_model; config may have
    been read already. runs_on: the device that it stands for, which need not be there: on another
    one a model has another form.
    """
    meta = torch.device("meta")
    model, parameters = _build(config, dtype, meta, max_model_len, torch.device(runs_on))
    parameters.leave_empty()
    parameters.finish()
    return model


def count_weights(config: ModelConfig) -> int:
    """Numbers in the layers' matrices, each of which a token is multiplied with once; without the
    embedding and the head, which have vocab_size * hidden_size, and without norms and biases.

    Example: a Llama layer with 32 heads of 128, 8 KV heads, 4,096 and 14,336: 218 million.
    """
    _, parameters = _build(config, torch.bfloat16, torch.device("meta"), 1)
    apart = (Split.WHOLE, Split.VOCABULARY)
    return sum(
        math.prod(piece.shape)
        for piece in parameters.pieces
        if piece.split not in apart and len(piece.shape) == 2
    )


def folds_norms(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether norms are folded into the products behind them. These are of sums that are not normed
    then: their numbers may be beyond fp16. On a CPU nothing is won.
    """
    return dtype == torch.bfloat16 and device.type != "cpu"


def _build(
    config: Mapping[str, object] | ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None,
    runs_on: torch.device | None = None,
) -> tuple[CausalLM, Parameters]:
    """The model, and its parameters to be filled."""
    runs_on = runs_on or device
    if isinstance(config, ModelConfig):
        shape, family = config, family_of_architecture(config.architecture)
    else:
        family = family_of(config)
        shape = family.read_config(config)
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; supported are {', '.join(map(str, DTYPES))}")
    parameters = Parameters(
        dtype=dtype,
        device=device,
        rank=0,
        num_ranks=1,
        runs_on=runs_on,
        folds_norms=folds_norms(dtype, runs_on),
    )
    return family.build(shape, parameters, _max_model_len(shape, max_model_len)), parameters


def _max_model_len(config: ModelConfig, wanted: int | None) -> int:
    if wanted is None:
        if config.max_position_embeddings > _LONGEST_BY_DEFAULT:
            raise ValueError(
                f"config: max_position_embeddings is {config.max_position_embeddings}, more than "
                f"{_LONGEST_BY_DEFAULT}; choose how many tokens to serve with max_model_len"
            )
        return config.max_position_embeddings
    if not 1 <= wanted <= config.longest_context:
        raise ValueError(
            f"max_model_len is {wanted}, but the model allows 1 to {config.longest_context}"
        )
    return wanted


def _load(
    model: CausalLM, parameters: Parameters, tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    unexpected, wrong = [], []
    scales = KVScaleReader(model.config)
    tied: list[tuple[str, torch.Tensor, Parameter]] = []
    for stored_name, tensor in tensors:
        full_name = model.base_prefix + stored_name
        name = stored_name if parameters.find(full_name) is None else full_name
        parameter = parameters.find(name)
        if parameter is not None:
            try:
                parameter.load(name, tensor)
            except ValueError as error:
                wrong.append((name, str(error)))
        elif name in model.tied:
            tied.append((name, tensor, model.tied[name]))
        elif not (scales.take(name, tensor) or model.derived.fullmatch(name)):
            unexpected.append(name)
    refused = {name for name, _ in wrong}
    missing = [name for name in parameters.missing if name not in refused]
    problems = [
        f"{what} ({len(names)}): {_some(names)}"
        for what, names in (
            ("missing tensors", missing),
            ("unexpected tensors", sorted(unexpected)),
            ("unfit tensors", sorted(reason for _, reason in wrong)),
        )
        if names
    ]
    if problems:
        raise ValueError(
            f"the checkpoint does not fit {model.config.architecture}: {'; '.join(problems)}"
        )
    model.kv_scales = scales.scales()
    for name, tensor, parameter in tied:
        _compare_tied(name, tensor, parameter)


def _some(names: list[str]) -> str:
    # Names of a file: only plain ones are shown as they are.
    plain = [one if one.isprintable() else repr(one) for one in names[:_SHOWN]]
    return ", ".join([*(one[:200] for one in plain), *(["..."] if len(names) > _SHOWN else [])])


def _compare_tied(name: str, tensor: torch.Tensor, parameter: Parameter) -> None:
    used = parameter.data
    if tensor.shape != used.shape or not torch.equal(tensor.to(used), used):
        logger.warning(
            "the checkpoint holds %s with other values than the embedding; it is not used, "
            "because the configuration ties the two",
            name,
        )
