"""TorchRL's names for inference engines: the counterpart of ``torchrl.weight_update.llm``."""

from weightsync.torchrl.llm.double_buffer import (
    VLLMDoubleBufferSyncScheme,
    VLLMDoubleBufferTransport,
    VLLMDoubleBufferWeightReceiver,
    VLLMDoubleBufferWeightSender,
)
from weightsync.torchrl.llm.senders import get_model_metadata
from weightsync.torchrl.llm.sglang import SGLangCollectiveTransport, SGLangWeightSender, SGLangWeightSyncScheme
from weightsync.torchrl.llm.vllm import (
    VLLMCollectiveTransport,
    VLLMWeightReceiver,
    VLLMWeightSender,
    VLLMWeightSyncScheme,
)

get_sglang_model_metadata = get_model_metadata

__all__ = [
    "SGLangCollectiveTransport",
    "SGLangWeightSender",
    "SGLangWeightSyncScheme",
    "VLLMCollectiveTransport",
    "VLLMDoubleBufferSyncScheme",
    "VLLMDoubleBufferTransport",
    "VLLMDoubleBufferWeightReceiver",
    "VLLMDoubleBufferWeightSender",
    "VLLMWeightReceiver",
    "VLLMWeightSender",
    "VLLMWeightSyncScheme",
    "get_model_metadata",
    "get_sglang_model_metadata",
]
