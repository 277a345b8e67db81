"""Every setting that a vLLM server would run with, straight from the engine's own configuration classes.

    python -m engine.support.config_dump OUT.json [flags of vllm serve…]

Writes ``direct``, in which no kvcatch code takes part (nested configuration objects become ``section.name``; only plain
values), ``recorded``, what the recorder puts into its header for the same configuration, and ``flags``, every option
of the server's parser.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
from pathlib import Path
from typing import Any

from kvcatch.capture.info import sections


def main(argv: list[str]) -> int:
    """Resolve the flags as the server does and write the table."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(argv[1:]))
    config = arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    table: dict[str, Any] = {}
    for section in dataclasses.fields(config):
        if section.name.endswith("_config"):
            _walk(section.name.removesuffix("_config"), getattr(config, section.name), table)
    options = sorted({option for action in parser._actions for option in action.option_strings})
    recorded = sections(config)
    Path(argv[0]).write_text(json.dumps({"direct": table, "recorded": recorded, "flags": options}))
    return 0


def _walk(path: str, value: Any, into: dict[str, Any]) -> None:
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or isinstance(value, (bool, int, float, str)):
        into[path] = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                _walk(f"{path}.{field.name}", getattr(value, field.name), into)
    elif isinstance(value, (list, tuple)) and all(isinstance(one, (bool, int, float)) for one in value):
        into[path] = " ".join(map(str, value))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
