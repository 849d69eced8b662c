"""The TorchRL side: samples as TensorDicts, the loss module, the transforms, the protocol of tasks."""
