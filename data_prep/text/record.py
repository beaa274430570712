"""What the manifest records of a command, and whether a stream has come about by it."""

from typing import Any, Sequence

from data_prep.existing_stream import refuse_other_command
from data_prep.text.options import PrepOptions
from data_prep.text.source import SPOOLED, Source
from fairseq_alma.data.manifest import file_sha256
from fairseq_alma.data.stream import Stream
from fairseq_alma.data.tokenizer import find_tokenizer_file


def completed_before(options: PrepOptions, there: Stream, record: dict[str, Any]) -> bool:
    """Tell whether the stream has come about by this command too.

    Raises:
        AlmaError: it was made by a command that differs, and this one does not append.
    """
    if options.append:
        return any(all(entry[key] == record[key] for key in record) for entry in there.history)
    advice = "choose another --out, remove the stream, or use --append for what arrived later"
    refuse_other_command(options.out, there.history[0], record, advice)
    return True


def record_of(options: PrepOptions, sources: Sequence[Source]) -> dict[str, Any]:
    """Describe a command by all that decides its result."""
    tokenizer = None if options.tokenizer is None else file_sha256(find_tokenizer_file(options.tokenizer))
    inputs = [
        {
            "argument": source.argument,
            "name": "-" if source.path.name == SPOOLED else source.path.name,
            "format": source.form,
            "size": source.size,
            "sha256": file_sha256(source.path),
        }
        for source in sources
    ]
    command = "append" if options.append else "create"
    return {"command": command, "options": options.that_decide(tokenizer), "inputs": inputs}
