import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).parent)
)  # for synthetic_study, also under --import-mode=importlib
