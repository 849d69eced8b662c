"""Train an agent as it is: written with OpenAI's SDK, with a tool, a retry and a sub-agent (docs/agents.md)."""

import json
import re

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string", "description": "Of numbers."}}}
FUNCTION = {
    "name": "calculate",
    "description": "Give its value.",
    "parameters": PARAMETERS | {"required": ["expression"]},
    "return": {"type": "string"},  # as `make agent` has shown it to the policy
}
TOOLS = [{"type": "function", "function": FUNCTION}]


def calculate(expression):
    expression = str(expression)  # a policy may write a number, too
    if not re.fullmatch(r"[\d+*() -]{1,99}", expression) or "**" in expression:
        return "error: only numbers, +, -, * and parentheses"
    try:
        return str(eval(expression))
    except (SyntaxError, TypeError) as error:
        return f"error: {error}"


def solve(client, messages):
    """Ask until there is no call; return the last number of the answer."""
    for _ in range(3):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages = [*messages, message]
        if not message.tool_calls:
            numbers = re.findall(r"-?\d+", message.content or "")
            return numbers[-1] if numbers else None
        for call in message.tool_calls:
            result = calculate(json.loads(call.function.arguments).get("expression", ""))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None


def run(row, base_url, api_key):
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key=api_key)
    answer = solve(client, row["prompt"]) or solve(client, row["prompt"])  # a retry, if there was no number
    question = row["prompt"][-1]["content"]
    second = solve(client, [{"role": "user", "content": f"Check this: {question}"}])  # a sub-agent with its own prompt
    return 0.75 * (answer == row["ground_truth"]) + 0.25 * (second == row["ground_truth"])


if __name__ == "__main__":
    import sota_grpo

    rows = [{"prompt": f"What is {n} * 7?", "ground_truth": str(7 * n)} for n in range(10, 74)]
    options = [f"env.agent={__file__}:run", "env.max_steps=12", "reward.success_above=0.5", "engine=transformers"]
    result = sota_grpo.train(
        "grpo_cpu", dataset=rows, overrides=[*options, "eval.mode=off", "train.total_dialog_turns=128"]
    )
    print(result.metrics[["reward", "success"]])
