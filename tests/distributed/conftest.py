"""Lets the tests here import harness and scenario, also in the processes they start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
