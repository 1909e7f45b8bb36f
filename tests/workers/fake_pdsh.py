"""As pdsh runs one command on each of several machines, which are all this one: deepspeed's way of using it only."""

import subprocess
import sys


def main() -> int:
    arguments = sys.argv[1:]
    hosts = arguments[arguments.index("-w") + 1].split(",")
    command = " ".join(arguments[arguments.index("-w") + 2 :])
    started = [subprocess.Popen(["bash", "-c", command.replace("%n", str(i))]) for i in range(len(hosts))]
    return max(each.wait() for each in started)


if __name__ == "__main__":
    sys.exit(main())
