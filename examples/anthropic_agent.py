"""Train an agent as it is: written with Anthropic's SDK, with a tool; openai_agent.py has a sub-agent too."""

import re

SCHEMA = {
    "type": "object",
    "properties": {"expression": {"type": "string", "description": "Of numbers."}},
    "required": ["expression"],
}
TOOLS = [{"name": "calculate", "description": "Give its value.", "input_schema": SCHEMA, "return": {"type": "string"}}]


def calculate(expression):
    expression = str(expression)  # a policy may write a number, too
    if not re.fullmatch(r"[\d+*() -]{1,99}", expression) or "**" in expression:
        return "error: only numbers, +, -, * and parentheses"
    try:
        return str(eval(expression))
    except (SyntaxError, TypeError) as error:
        return f"error: {error}"


def run(row, base_url, api_key):
    from anthropic import Anthropic

    client = Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
    messages = list(row["prompt"])
    for _ in range(3):
        reply = client.messages.create(model="policy", max_tokens=120, messages=messages, tools=TOOLS)
        messages.append({"role": "assistant", "content": reply.content})
        uses = [block for block in reply.content if block.type == "tool_use"]
        if not uses:
            numbers = re.findall(r"-?\d+", reply.content[0].text)
            return float(numbers[-1:] == [row["ground_truth"]])
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": calculate(use.input.get("expression", ""))}
            for use in uses
        ]
        messages.append({"role": "user", "content": results})
    return 0.0


if __name__ == "__main__":
    import sota_grpo

    rows = [{"prompt": f"What is {n} * 7?", "ground_truth": str(7 * n)} for n in range(10, 74)]
    options = [f"env.agent={__file__}:run", "env.max_steps=4", "engine=transformers", "eval.mode=off"]
    result = sota_grpo.train("grpo_cpu", dataset=rows, overrides=[*options, "train.total_dialog_turns=128"])
    print(result.metrics[["reward", "success"]])
