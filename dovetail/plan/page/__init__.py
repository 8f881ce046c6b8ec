"""The pictures of a plan, as one page that works without a network."""

from dovetail.plan.page.page import Choice, Curve, Page, Share, html, write

__all__ = ["Choice", "Curve", "Page", "Share", "html", "write"]
