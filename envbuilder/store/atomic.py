"""Moved: see envbuilder.atomic."""

from envbuilder.atomic import *  # noqa: F403
from envbuilder.atomic import PREFIX as PREFIX
