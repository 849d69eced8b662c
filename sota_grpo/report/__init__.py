"""The report: one HTML file about one run or several, which needs no server and no network.

Everything is read from run directories, finished or not; nothing here knows the trainer.
"""

from sota_grpo.report.page import write_report
from sota_grpo.report.training import TrainingReport

__all__ = ["TrainingReport", "write_report"]
