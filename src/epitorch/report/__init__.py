"""One self-contained page on runs, its figures as PNG and SVG, its tables as Markdown, CSV and LaTeX."""

from epitorch.report._report import Report, charts_of, collect, report
from epitorch.report._timed import load_deployment, save_deployment

__all__ = ["Report", "charts_of", "collect", "load_deployment", "report", "save_deployment"]
