"""The script around ``trl.GRPOConfig``; what stands in braces is filled in by :mod:`sota_grpo.migration.trl`."""

SCRIPT = """{comment}
from __future__ import annotations

{imports}

HERE = Path(__file__).resolve().parent
MODEL = {model}


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO with TRL, as a run of sota_grpo was trained.")
    parser.add_argument("--output-dir", default=str(HERE / "output"))
    parser.add_argument("--max-steps", type=int, help="optimizer steps, instead of those of the run")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint in --output-dir")
    options = parser.parse_args()
    os.environ.setdefault("WANDB_PROJECT", {project})
    arguments = GRPOConfig(
        output_dir=options.output_dir,
{arguments}
    )
    if options.max_steps is not None:
        arguments.max_steps = options.max_steps
    trainer = GRPOTrainer(
        model=MODEL,
        reward_funcs=[{rewards}],
        args=arguments,
        train_dataset=load_dataset("json", data_files=str(HERE / "train.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(
            MODEL, padding_side="left", truncation_side="left", trust_remote_code={trust_remote_code}
        ),
        peft_config={lora},
    )
    trainer.train(resume_from_checkpoint=options.resume or None)
    trainer.save_model(options.output_dir)


if __name__ == "__main__":
    main()
"""
