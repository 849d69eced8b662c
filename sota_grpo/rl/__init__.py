"""The TorchRL side: samples as TensorDicts, the loss module, the transforms, what a task is."""
