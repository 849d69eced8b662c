"""The report: one HTML file about one run or several, which needs no server and no network.

Everything is read from run directories, finished or not; nothing here knows the trainer.
"""

from sota_grpo.report.page import TrainingReport, write_report

__all__ = ["TrainingReport", "write_report"]
