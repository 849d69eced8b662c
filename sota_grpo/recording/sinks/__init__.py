"""Where metrics go besides the run directory: Weights & Biases and TensorBoard, behind one small protocol."""

from sota_grpo.recording.sinks.base import CopySink, Sink
from sota_grpo.recording.sinks.tensorboard_sink import FOLDER, TensorBoardSink
from sota_grpo.recording.sinks.wandb_sink import MODES, RUN_ID_FILE, WandbSink, has_api_key

__all__ = [
    "FOLDER",
    "MODES",
    "RUN_ID_FILE",
    "CopySink",
    "Sink",
    "TensorBoardSink",
    "WandbSink",
    "has_api_key",
]
