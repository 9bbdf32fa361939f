import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).parents[1] / "report")
)  # synthetic_study lives with the report's tests
