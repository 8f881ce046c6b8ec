"""A level of logging for what a user should see and need not worry about: shown as warnings are, but named NOTE."""

import logging

NOTE = logging.WARNING + 1
logging.addLevelName(NOTE, "NOTE")
