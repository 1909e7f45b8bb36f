import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # for the store that tests and their workers share
