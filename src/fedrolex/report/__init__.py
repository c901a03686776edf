"""Reports: what runs did, as one page that needs nothing else."""

from fedrolex.report.write import page_of, write_report

__all__ = ["page_of", "write_report"]
