"""Show plans on a page of interactive pictures that works without a network."""

from dovetail.plan.page.page import Choice, Curve, Page, Share, html, write

__all__ = ["Choice", "Curve", "Page", "Share", "html", "write"]
