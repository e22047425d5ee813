"""Judge one file and print [[criterion, what should hold, complaint], …] as JSON. A complaint "": it holds."""

import json
import sys
from pathlib import Path

from scratch_ddp.course.capstone import my_class, script


def main(path: Path) -> None:
    judging = script if path.stem.startswith("misbehaving") else my_class
    print(json.dumps([(name, judging.PROMISES[name], complaint) for name, complaint in judging.judge(path).items()]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
