"""problem → Choice: backend and configuration, from tables, the ranker or the default path."""

from anyfp8.select.choice import Choice, Plan, Request
from anyfp8.select.selection import M_GRID, plan, select

__all__ = ["M_GRID", "Choice", "Plan", "Request", "plan", "select"]
