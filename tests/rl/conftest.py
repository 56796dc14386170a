import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # tests here share sources and runs of test_rl_stage.py
