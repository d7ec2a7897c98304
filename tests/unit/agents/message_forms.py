"""How harnesses send an answer back: each takes and gives a message of a chat completion."""

import copy


def gym(message):
    """An answer as NeMo Gym sends it back: thoughts apart, the three lists of ids along."""
    thought, end, words = (message["content"] or "").partition("</think>")
    back = {**message, "content": words if end else message["content"] or ""}
    back.pop("weight_versions", None)
    if end:
        back["reasoning_content"] = back["reasoning"] = thought.removeprefix("<think>")
    return back


def sdk(message):
    """An answer as most harnesses send it back: content and calls alone."""
    kept = copy.deepcopy({key: message[key] for key in ("role", "content", "tool_calls") if key in message})
    return kept if kept["content"] else {**kept, "content": None}


def parts(message):
    """An answer in parts, its arguments spelt in another way."""
    back = sdk(message)
    back["content"] = [{"type": "text", "text": back["content"] or ""}]
    for call in back.get("tool_calls", []):
        call["function"]["arguments"] = call["function"]["arguments"].replace(" ", "")
    return back
