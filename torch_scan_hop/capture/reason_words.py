"""What Dynamo says of a body that it does not trace, in words of scans, and what helps."""

from __future__ import annotations

#: what Dynamo says in its own words, and what it means for a scan; \1 is a group of the pattern
MEANINGS = (
    (r"raised exception TypeError\('scan: (what an? .*? dataclass)'\)", r"\1"),
    (
        r"torch\.nn\.Parameter\(\)` constructor",
        "the body makes a parameter, which would be another one at each step",
    ),
    (r"copy\.deepcopy(\(\)| a tensor)", "the body makes a deep copy of a tensor"),
    (r"marked as skipped.*copy\.copy\(", "the body calls copy.copy() of a dict or a list"),
    ("RemovableHandleClass.*context manager", "the body removes a hook that it registers"),
    # Dynamo may come to write down what the hook changes before this package refuses it
    (
        r"^<class '.*Variable'>.*\.register_hook\(",
        "a hook that the body registers changes what the loop keeps",
    ),
    (
        r"(saved_tensors_hooks|save_on_cpu).*skipped|skipped.*(saved_tensors_hooks|save_on_cpu)",
        "the body says how tensors are saved for its backward",
    ),
    (
        r"setattr.*type.*register_\w+_hook",
        "the body registers a hook on a module, which the loop does at every step",
    ),
    (
        r"setattr` with argument types \['type'",
        "the body assigns to an attribute of a class, which Dynamo does not trace on this torch",
    ),
    (
        r"non-function __getattr__.*getattr `(\w+)`",
        r"the body reads attribute '\1' of an object whose class takes __getattr__ from dict",
    ),
    (
        "trace method `__setattr__` of class `SimpleNamespace`",
        "the body assigns to an attribute of a SimpleNamespace, which Dynamo does not trace on "
        "this torch",
    ),
    (
        r"trace method `__setattr__` of class `\w+`",
        "the body assigns to an attribute of an object whose class takes __setattr__ from dict",
    ),
    (
        r"builtin operator `complex`",
        "the body makes a complex number of a number that steps make",
    ),
    (
        "enter a `RLock`",
        "the body computes a functools.cached_property, and others may wait for it",
    ),
    ("Module-level backwards hooks", "the body calls a module that has a backward hook"),
    (r"autograd\.grad.*trace_autograd_ops", "the body calls torch.autograd.grad"),
    (r"requires_grad_\(\)`", "the body calls requires_grad_()"),
    (r"Tensor\.retain_grad\(\) with", "the body calls retain_grad()"),
    (r"as_proxy.*generator=", "the body draws from a torch.Generator of its own"),
    (
        r"(?i:data.dependent|marked as skipped).*(?<![\w.])random\.\w+\(",
        "the body draws from Python's `random`",
    ),
    (
        r"(OrderedDict|returned non-Tensor).*state_dict\(",
        "the body asks a module for its state_dict()",
    ),
    (r"\bfork_rng\(", "the body puts the states of random numbers back (fork_rng)"),
    (r"marked as skipped.*detect_anomaly", "the body sets torch's anomaly detection"),
    (
        r"`Optimizer\.\w+`|torch/optim/|(graph_break\(\)`|setattr.*type).*(\.step\(|optim)",
        "the body uses an optimizer of torch.optim, which changes tensors that it did not make",
    ),
    (
        r"one_hot` with data-dependent",
        "the body makes as many classes as the values of a tensor say",
    ),
    (r"returned non-Tensor.*result_type\(", "the body calls torch.result_type"),
    (
        r"UnsupportedFakeTensorException.*(\.item\(|complex\()",
        "the body reads a complex number from a tensor",
    ),
    (r"(?i:data.dependent).*gaussian_nll_loss\(", "the loss asks if a variance is negative"),
    (
        r"(?i:data.dependent).*np\.random\.|numpy_random_stream|method `\w+` of class `Generator`",
        "the body draws from NumPy's random numbers",
    ),
    (r"`manual_seed`|Generator\.manual_seed", "the body seeds random numbers"),
    (
        r"(python_type\(\) call|`range` with argument types \['Tensor).*\brange\(",
        "the body repeats as often as a number of a step says",
    ),
    (
        r"(?:Unhandled tensor method \(Tensor method `|Missing attribute.* call_method )(\w+)",
        r"the body calls \1() of a number that steps make",
    ),
    ("special method without.*'[a-z]+_iterator'", "the body reads from an iterator"),
    (
        r"Could not extract specialized integer|unsupported index\(Tensor",
        "the body needs an int that steps make, or that a tensor holds, when it is traced",
    ),
    (
        "Could not guard on data-dependent|^Data-dependent branching",
        "the body decides by the value of a tensor, or of a number that steps make",
    ),
    (
        "Failed to convert args/kwargs to proxy",
        "the body gives torch an object that is no tensor, as h + x does if h is one, or x.add(h)",
    ),
)

#: what helps, by a pattern of the meaning or of the user's line
FIXES = (
    (
        "a hook that the body registers changes",
        "Return a new gradient from the hook, as g * 0.5. To see the gradients of h, add zeros "
        "to it that come from xs, and look at theirs.",
    ),
    (
        "makes a parameter",
        "Write to the one that there is: p.copy_(new), under torch.no_grad().",
    ),
    ("deep copy of a tensor", "Write tensor.detach().clone()."),
    (r"copy\.copy\(\) of", "Write value.copy()."),
    ("length of a deque", "Fill it before the scan, as in deque([zeros] * n, maxlen=n)."),
    ("attribute of a class", "Keep it in an attribute of the object."),
    ("makes a complex number", "Compute it, as k + 1j * d."),
    ("cached_property", "Read it before the scan."),
    (
        r"state_dict\(",
        "Go through parameters, as in for a, b in zip(t.parameters(), s.parameters()): a.copy_(b), "
        "under torch.no_grad().",
    ),
    ("__dict__", "Assign to each attribute: obj.h = h."),
    (r"quantile\(", "Sort, and take what is there: h.sort().values[k]."),
    ("SimpleNamespace", "Keep it in an object of a class of your own, or in a dict."),
    ("removes a hook", "Leave the hook out: no backward comes before it is removed."),
    ("how tensors are saved", "Enter the context around the scan."),
    (
        r"module that has a backward hook|register_\w*backward_\w*hook",
        "Register the hook on a tensor in the body: module(x).register_hook(f).",
    ),
    ("registers a hook on a module", "Register it before the scan."),
    ("what the grad_fn of", "Ask if h.requires_grad, or if h.grad_fn is None."),
    (
        r"calls torch\.(set_|use_)",
        "Call it before the scan; for one tensor, name the dtype: torch.ones(3, dtype=x.dtype).",
    ),
    (
        r"takes __([gs])etattr__ from dict",
        "Write it in Python: def __getattr__(self, name): return self[name], and so __setattr__.",
    ),
    (
        "an object that is no tensor",
        "Compute with the tensors in it, as in h.value + x, or call its method: h.plus(x).",
    ),
    ("calls retain_grad", "Return the tensor in ys, and call ys.retain_grad() after the scan."),
    (
        "draws from (a torch.Generator|Python's `random`|NumPy's)",
        "Draw before the scan, and pass what was drawn in xs.",
    ),
    ("seeds random numbers", "Seed them before the scan."),
    ("reads from an iterator", "Read from it before the scan, and pass what it gives in xs."),
    ("fork_rng", "Enter it around the scan; or draw before the scan, and pass that in xs."),
    ("anomaly detection", "Enter it around the scan."),
    (
        "an optimizer of torch.optim",
        "Write the update out, with the weights in the carry and the gradient of torch.func.grad: "
        "w = w - lr * grad(loss)(w, x).",
    ),
    ("as many classes as", "Say how many there are: one_hot(i, num_classes=n)."),
    ("torch.result_type", "Write torch.promote_types(h.dtype, x.dtype)."),
    ("reads a complex number", "Keep it a tensor, of no dimensions: z[0], or z.sum()."),
    ("variance is negative", "Write it out: 0.5 * (var.log() + (y - mean) ** 2 / var).mean()."),
    (
        r"bincount\(",
        "Count into as many places as there may be: torch.zeros(n).index_add(0, i, ones).",
    ),
    (
        "data-dependent size|Dynamic shape operator",
        "Rows that a mask selects may be computed row by row, and then written by the same mask or "
        "summed. Otherwise compute all rows, and choose: h = torch.where(mask, new, h).",
    ),
    (r"print|logging|builtin.*skip", "Print after the scan, from ys, or run it under fallback."),
    (
        r"\brange\(",
        "If a tensor says how often, repeat as often as it may say, and keep what counts with "
        "torch.where(k < n, new, old).",
    ),
    (
        r"make to \w*dropout\(",
        "Write it out: torch.where(torch.rand_like(h) < p, 0.0, h / (1 - p)).",
    ),
    (
        "calls __round__",
        "Round before the scan, or a tensor: torch.round(torch.as_tensor(d), decimals=2).",
    ),
    (
        "torch takes a Python number there",
        "Write it out with what takes a tensor, as +, * and torch.where do; of a flag that changes "
        "at each step, choose with torch.where.",
    ),
    (
        "specialized integer|needs an int|non-scalar tensor",
        "Keep the number a tensor: an item of a list of tensors is torch.stack(tensors)[i].",
    ),
    (
        r"data.dependent|decides by the value|Could not (guard|extract)|\.item\(\)|unbacked",
        "Choose with torch.where, or keep the value a tensor.",
    ),
    (r"calls requires_grad_|autograd\.grad", "Use torch.func.grad in the body."),
    (
        "sparse",
        "Use tensor.to_dense(), or clones of its indices() and values(), and index_add.",
    ),
)
