"""Tools of kinds that OpenAI and Anthropic define: served as functions, or left out.

Some run on the client, which knows how to handle a call. The vendor's servers run the others, so
here a call of one has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlm_serve.preprocess.reading.chat import read_tool
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.preprocess.reading.values import list_of, object_of, text_of, unsupported

_ANTHROPIC_SERVERS = (
    "advisor_",
    "code_execution_",
    "computer_",
    "mcp",
    "tool_search_",
    "web_fetch_",
    "web_search_",
)
"""Beginnings of the types of tools that are left out of /v1/messages."""
_OPENAI_SERVERS = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "namespace",
    "shell",
    "tool_search",
    "web_search",
)
"""Beginnings of the types of tools that are left out of /v1/responses."""


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _object(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


_PATH = _text("The path of the file or folder.")
_BASH = _object(
    (),
    command=_text("The command to run."),
    restart={"type": "boolean", "description": "true starts the shell anew."},
)
_LINE_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "The first and the last line to view, counted from 1; -1 is the file's end.",
}


def _files(
    required: Sequence[str], commands: Sequence[str], insert_line: str, **more: Any
) -> dict[str, Any]:
    """Return the input schema of a tool that edits files.

    Args:
        insert_line: describes the option of this name.
        more: further options.
    """
    return _object(
        required,
        command={"type": "string", "enum": list(commands)},
        path=_PATH,
        file_text=_text("For create: the content of the file."),
        old_str=_text("For str_replace: the text to replace."),
        new_str=_text("For str_replace: the new text."),
        insert_line={"type": "integer", "description": insert_line},
        insert_text=_text("For insert: the text to insert."),
        view_range=_LINE_RANGE,
        **more,
    )


def _editor(*commands: str) -> tuple[str, dict[str, Any]]:
    line = "For insert: the number of the line behind which to insert; 0: at the beginning."
    schema = _files(("command", "path"), (*_EDITOR, *commands), line)
    return "View, create and edit files.", schema


_EDITOR = ("view", "create", "str_replace", "insert")
_MEMORY = _files(
    ("command",),
    (*_EDITOR, "delete", "rename"),
    "For insert: the number of the line.",
    old_path=_text("For rename: the present path."),
    new_path=_text("For rename: the new path."),
)
_CLIENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bash_": ("Run a command in a shell that stays open between calls.", _BASH),
    "text_editor_20241022": _editor("undo_edit"),
    "text_editor_20250124": _editor("undo_edit"),
    "text_editor_": _editor(),
    "memory_": ("Keep notes in files under /memories, across conversations.", _MEMORY),
}
"""Beginning of the type of a tool that the client runs -> its description and input schema."""


def read_block_tools(tools: Any, conversation: Conversation) -> list[dict[str, Any]]:
    """Read the tools of a Messages body as functions; what is left out is named in `ignored`.

    Raises InvalidRequestError, naming the tool at fault.
    """
    kept = _kept(tools, conversation, _ANTHROPIC_SERVERS)
    return [_nested(_block_function(tool, where)) for where, tool in kept]


def read_item_tools(tools: Any, conversation: Conversation) -> list[dict[str, Any]]:
    """Read the tools of a Responses body, as `read_block_tools` does."""
    kept = _kept(tools, conversation, _OPENAI_SERVERS)
    # A grammar for the input is told to the model, but not enforced.
    conversation.ignored += [f"{where}.format" for where, tool in kept if _is_grammar(tool)]
    return [_nested(_item_function(tool, where)) for where, tool in kept]


def read_chat_tools(body: Mapping[str, Any], conversation: Conversation) -> list[dict[str, Any]]:
    """Read the tools of a chat body, or its older `functions`, as `read_block_tools` does."""
    field = "functions" if body.get("functions") and body.get("tools") is None else "tools"
    if field == "tools" and body.get("functions"):
        conversation.ignored.append("functions")
    given = [_flat(tool) for tool in list_of(body.get(field) or (), field)]
    read = []
    for where, tool in _kept(given, conversation, (), field):
        if tool.get("type") == "custom":
            conversation.ignored += [f"{where}.custom.format"] if _is_grammar(tool) else []
            tool = _nested(_item_function(tool, where))
        read.append(_nested(tool) if field == "functions" else tool)
    return read


def _flat(tool: Any) -> Any:
    """Return a custom tool of a chat as /v1/responses has it."""
    custom = tool.get("custom") if isinstance(tool, Mapping) else None
    if not isinstance(custom, Mapping) or tool.get("type") != "custom":
        return tool
    form = custom.get("format")
    grammar = form.get("grammar") if isinstance(form, Mapping) else None
    flat = {"format": {**form, **grammar}} if form and isinstance(grammar, Mapping) else {}
    return {**custom, **flat, "type": "custom"}


def _nested(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function}


def _kept(
    tools: Any, conversation: Conversation, left_out: tuple[str, ...], field: str = "tools"
) -> list[tuple[str, dict[str, Any]]]:
    """Return the tools that are not left out, each with its place in the request."""
    kept = []
    for at, tool in enumerate(() if tools is None else list_of(tools, "tools")):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if isinstance(kind, str) and kind.startswith(left_out):
            conversation.ignored.append(f"{field}[{at}]")
        else:
            kept.append((f"{field}[{at}]", read_tool(tool, f"{field}[{at}]")))
    return kept


def _block_function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind in (None, "custom"):
        given = {key: tool[key] for key in ("name", "description") if key in tool}
        return given | {"parameters": tool.get("input_schema") or {}}
    for beginning, (description, schema) in _CLIENTS.items():
        if isinstance(kind, str) and kind.startswith(beginning):
            return {"name": tool["name"], "description": description, "parameters": schema}
    raise unsupported(f"{where}.type", kind)


def _item_function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = {key: tool[key] for key in tool if key != "type"}
    if tool.get("type") == "function":
        return function
    if tool.get("type") != "custom":
        raise unsupported(f"{where}.type", tool.get("type"))
    about = [tool["description"]] if tool.get("description") else []
    if _is_grammar(tool):
        form = object_of(tool["format"], f"{where}.format")
        given = [text_of(form, name, f"{where}.format") for name in ("syntax", "definition")]
        about.append(f"The input must match this grammar ({given[0]}):\n{given[1]}")
    definition: dict[str, Any] = {"name": tool["name"]}
    if about:
        definition["description"] = "\n\n".join(about)
    return definition | {"parameters": _object(("input",), input={"type": "string"})}


def _is_grammar(tool: Mapping[str, Any]) -> bool:
    form = tool.get("format")
    return (
        tool.get("type") == "custom" and isinstance(form, Mapping) and form.get("type") == "grammar"
    )
