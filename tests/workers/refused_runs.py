"""Runs of run/train.py in one process, each expected to be refused: prints the messages. Arguments: a JSON file with
command lines by name, and one for the messages."""

import json
import sys
from pathlib import Path

from run_many import load_train

from llava_ds.config.plugin_calls import error_of_plugin
from llava_ds.constants import ConfigError

if __name__ == "__main__":
    train, found = load_train(), {}
    for name, argv in json.loads(Path(sys.argv[-2]).read_text()).items():
        try:
            train.main(argv)
            found[name] = "not refused"
        except ConfigError as refused:
            found[name] = str(refused)
        except Exception as error:
            found[name] = error_of_plugin(error) or f"a traceback: {error!r}"
        Path(sys.argv[-1]).write_text(json.dumps(found))
