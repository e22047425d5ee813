"""Judge one file and print [[criterion, what should hold, complaint], …] as JSON. A complaint "": it holds."""

import json
import sys
from pathlib import Path

from scratch_ddp.course.capstone import my_class, script


def main(path: Path) -> None:
    judge, promises = my_class.judge, my_class.PROMISES
    if path.stem.startswith("misbehaving"):
        judge, promises = script.judge, script.PROMISES
    print(json.dumps([(name, promises[name], complaint) for name, complaint in judge(path).items()]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
