"""What torch's schemas and tags do not tell of its functions: groups of names, each with its reason.

`add` stands for the function, the method, `add_` and `x += y`; `add_` for nothing but that. To add a quirk:

1. find the wrong answer of the operator book, a `Quirk` here or a field of `OpInfo` in `ops.py` that a group feeds;
2. add the function's name to that group, or to a new one with the reason above it;
3. leave the smallest model that went wrong in `tests/zoo`;
4. run `tests/test_ops.py`: it knows which groups exclude each other, and which names this torch has.
"""

from __future__ import annotations

import enum


class Quirk(enum.Enum):
    """A group of functions. "Besides" in its comment names those that `ops.py` knows by schema, tag or spelling."""

    names: frozenset[str]

    def __init__(self, words: str) -> None:
        self.names = frozenset(words.split())

    # answers independent of content
    METADATA = """dim size numel nelement element_size is_floating_point is_complex get_device __len__ has_names name
        names result_type promote_types can_cast qscheme q_per_channel_axis _parse_to
        _has_compatible_shallow_copy_type _sym_int sym_int sym_float sym_max sym_min sym_not sym_sum sym_ite sym_sqrt
        sym_size sym_stride sym_numel sym_storage_offset _assert is_grad_enabled is_inference_mode_enabled is_same_size
        is_signed is_distributed dense_dim sparse_dim get_default_dtype is_storage is_tensor get_rng_state set_rng_state
        manual_seed initial_seed is_deterministic_algorithms_warn_only_enabled are_deterministic_algorithms_enabled
        is_autocast_enabled is_autocast_cpu_enabled get_autocast_dtype is_warn_always_enabled broadcast_shapes
        cudnn_is_acceptable _use_cudnn_ctc_loss"""
    # the same, but of the tensor object itself, which some of them change
    MARKS_OBJECT = "retain_grad register_post_accumulate_grad_hook share_memory_ rename_ __hash__"
    # answers that may differ between tensors of equal content: by memory layout, by format
    LAYOUT = "stride storage_offset is_contiguous dim_order is_non_overlapping_and_dense _debug_has_internal_overlap"
    FORMAT = "is_sparse is_sparse_csr is_nested layout"
    # what autograd knows of the value, and of the tensor object
    HISTORY = "requires_grad is_leaf grad_fn grad retains_grad is_inference"
    OBJECT = """is_pinned is_shared _is_view _base _version output_nr _backward_hooks
        _post_accumulate_grad_hooks"""
    # content as Python numbers, besides what is tagged as data-dependent; the first group also exists as operators
    DATA_DEPENDENT = "is_nonzero q_scale q_zero_point item"
    READS_CONTENT = """__bool__ __int__ __float__ __complex__ __index__ __format__ __repr__ __str__ tolist is_set_to
        __contains__ is_conj is_neg is_coalesced _nnz"""
    # of these, what gives no number to compute with: a truth value, a text
    GIVES_NO_NUMBER = "__bool__ is_nonzero equal allclose __repr__ __str__ __format__"
    # memory that other libraries read and write from then on; its address
    EXPOSES_MEMORY = "numpy __array__ __dlpack__ untyped_storage storage _typed_storage __array_wrap__"
    TELLS_ADDRESS = "data_ptr __dlpack_device__ __cuda_array_interface__"

    # written in Python, with a body that must stay hidden from function modes
    NEVER_OPENED = """__deepcopy__ __reduce_ex__ __repr__ __format__ __array__ __array_wrap__ __dlpack__
        __dlpack_device__ storage share_memory_ register_hook backward grad _unique_impl unflatten _typed_storage
        __setstate__ __dir__ module_load register_post_accumulate_grad_hook __cuda_array_interface__ __len__ __hash__
        rename_ rename refine_names align_to names is_shared __contains__"""
    UNDEFINED = "empty empty_like new_empty empty_strided new_empty_strided empty_permuted"
    DROPOUT = "dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout"
    RECURRENT = "lstm gru rnn_tanh rnn_relu"
    DETACHING = "detach data"
    CALLBACK = "map_ map2_ apply_"  # call Python for every element
    # in training they update running statistics, which no schema says
    UPDATES_STATISTICS = """batch_norm native_batch_norm _native_batch_norm_legit _batch_norm_impl_index
        instance_norm"""
    UPDATES_ALWAYS = "batch_norm_update_stats"  # the same, not in training alone
    # several views of one storage, besides those whose schema says so; to autograd they are no multi-output views
    SPLITTING = "unsafe_split unsafe_chunk unsafe_split_with_sizes"
    # always new memory (as for most single kernels, by their schemas), from a kernel that depends on dtype and layout
    # alone; or from one that also depends on the switches of products. All others depend on every switch
    ONE_KERNEL = """relu tanh sigmoid add sub mul div exp log sqrt rsqrt neg abs sin cos mean sum eq ne lt gt le ge
        where cumsum cat stack zeros_like ones_like tril triu masked_fill argmax embedding reciprocal leaky_relu elu
        hardtanh hardswish erf"""
    KERNEL_BY_PRODUCTS = """linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d gelu silu softmax log_softmax
        matmul mm bmm addmm baddbmm layer_norm group_norm max_pool1d max_pool2d max_pool3d avg_pool2d rms_norm mish selu
        adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d celu softplus"""
    # in place the same bits and the same gradients as out of place (`elu_` saves its result, and gives other gradients)
    EXACT_IN_PLACE = """relu_ sigmoid_ tanh_ silu_ hardtanh_ hardswish_ leaky_relu_ mish_ threshold_ hardsigmoid_ exp_
        sqrt_ rsqrt_ neg_ abs_ sin_ cos_ square_ reciprocal_ log_ floor_ ceil_ round_ erf_ clamp_ clamp_min_ clamp_max_
        relu6_"""
    EXACT_OF_TWO = "add_ sub_ mul_ div_ pow_ __iadd__ __isub__ __imul__ true_divide_"
    # products that torch decomposes in one way or another by `requires_grad` of their arguments
    FOLDS_BY_FLAGS = "matmul mm mv dot linear addmm addmv inner tensordot chain_matmul multi_dot"
    # passes `requires_grad` of its arguments to a kernel, which computes the gradients at once
    HANDS_ON_FLAGS = "linear_cross_entropy"
    # beneath transforms it is the ATen call of the same name, whatever the layout
    SAME_BENEATH = "sum mean prod amax amin any all std var cumsum select slice unbind index sort topk"
    # a kernel for a whole layer. Torch does not use it under a function mode: a capture sees the layer's operations
    WHOLE_LAYER = "_transformer_encoder_layer_fwd _native_multi_head_attention"

    # shapes that depend on content, besides what is tagged so: Python spellings, and stored elements of sparse tensors
    DYNAMIC_SHAPE = """unique histogramdd _pack_padded_sequence _pad_packed_sequence coalesce _coalesced indices values
        _indices _values crow_indices col_indices ccol_indices row_indices to_sparse _to_sparse to_sparse_csr
        to_sparse_csc to_sparse_coo to_sparse_bsr to_sparse_bsc lstsq sparse_resize_"""
    SHAPE_BY_INDEX = "__getitem__ index"  # a mask, or a slice whose ends are tensors
    SHAPE_BY_CONDITION = "where"  # if it is the only argument
    SHAPE_BY_SIZES = "repeat_interleave tensor_split _nested_tensor_from_tensor_list"  # in a second tensor
    SHAPE_BY_LARGEST = "one_hot"  # of the values, if the number of classes is not given
    SHAPE_BY_ENDS = "arange range"  # any number that is a tensor
    # may raise because of the numbers read; on integers only; because of a layout that allows no view
    CAN_RAISE = """cholesky cholesky_solve cholesky_inverse inverse inv solve solve_triangular lu lu_factor lu_solve
        ldl_factor ldl_solve svd svdvals eig eigh eigvals eigvalsh matrix_power tensorinv tensorsolve lstsq pinv
        pinverse matrix_rank cond logdet slogdet geqrf householder_product gather scatter scatter_add scatter_reduce
        index_select index_add index_copy index_fill index_put index_reduce index take take_along_dim put embedding
        embedding_bag nll_loss nll_loss2d nll_loss_nd cross_entropy_loss ctc_loss multi_margin_loss
        multilabel_margin_loss multinomial bernoulli poisson normal binomial exponential geometric log_normal cauchy
        uniform random histc histogram quantile nanquantile binary_cross_entropy max_unpool1d max_unpool2d max_unpool3d
        segment_reduce masked_scatter sparse_coo_tensor sparse_compressed_tensor sparse_csr_tensor __getitem__
        __setitem__ _standard_gamma _sample_dirichlet embedding_renorm"""
    CAN_RAISE_ON_INTEGERS = "floor_divide remainder fmod div divide true_divide pow __floordiv__ __mod__ gcd lcm"
    CAN_RAISE_BY_LAYOUT = "view view_as view_as_complex"
    # draws whose shape alone decides how many random numbers they take. `poisson` rejects proposals until one fits
    DRAWS_BY_SHAPE = """rand randn randint rand_like randn_like randint_like randperm normal normal_functional uniform
        random exponential log_normal cauchy geometric bernoulli multinomial dropout dropout1d dropout2d dropout3d
        native_dropout alpha_dropout feature_dropout feature_alpha_dropout scaled_dot_product_attention lstm gru
        rnn_tanh rnn_relu"""

    # read only shape and dtype of the first argument, besides `*_like` and `new_*`; of the second, besides `*_as`
    SHAPE_OF_FIRST = "new"
    SHAPE_OF_SECOND = "to resize_as_"
    OVERWRITES = """copy fill zero_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_ set_
        kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_ trunc_normal_ orthogonal_ constant_ ones_ zeros_
        eye_ dirac_ sparse_ __setitem__ index_put select_scatter slice_scatter as_strided_scatter diagonal_scatter
        scatter index_copy index_fill fill_diagonal_ resize_ _foreach_copy_ _foreach_zero_"""
    # normalize: the share of a single element is the same whatever its value
    SHARE = """softmax log_softmax softmin _softmax _log_softmax argmax argmin layer_norm native_layer_norm group_norm
        native_group_norm instance_norm batch_norm native_batch_norm normalize var std argsort logcumsumexp median mode
        gumbel_softmax var_mean std_mean scaled_dot_product_attention _safe_softmax rms_norm"""
    ATTENTION = "scaled_dot_product_attention"
    # use integers as memory offsets without checking them
    TRUSTS_INTEGERS = """_pad_packed_sequence _pack_padded_sequence lstm gru rnn_tanh rnn_relu ctc_loss _ctc_loss
        segment_reduce embedding_bag _embedding_bag _embedding_bag_forward_only sparse_csr_tensor sparse_csc_tensor
        sparse_bsr_tensor sparse_bsc_tensor sparse_coo_tensor sparse_compressed_tensor"""
    COMPARES = "eq ne lt le gt ge less less_equal greater greater_equal isin signbit sign abs"
    COMMUTATIVE = "add mul eq ne maximum minimum logical_and logical_or logical_xor bitwise_and bitwise_or"

    # never batched by rows: `masked_scatter`, and `index_put` with a mask, continue in their source where the last
    # row ended (so does vmap of torch 2.13, wrongly); the offsets of `embedding_bag` say where bags begin and end;
    # the lengths of `ctc_loss` and pivots of `lu_unpack` are not compared with what there is, and end the process;
    # `isin` looks among all rows, which shows only where a trial has the same whole number in two of them
    # `cdist` computes in another way, and far less exactly, from 26 rows on; that rows meet in a largest or least
    # number at one place, or in what is put there, may show in a single number of a trial
    MIXES_ROWS = """masked_scatter index_put embedding_bag ctc_loss lu_unpack isin cdist scatter_reduce index_reduce
        put"""
    # whole numbers among their arguments are sizes of what they read, besides those of views
    TAKES_SIZES = "layer_norm native_layer_norm rms_norm group_norm native_group_norm"
    WRONG_UNDER_VMAP = "masked_scatter"

    COPY = "clone copy _to_copy lift lift_fresh_copy contiguous _reshape_copy"
    ALLOCATION = "empty empty_strided empty_permuted resize resize_as set"
    FILL = "zero zeros ones full fill scalar_tensor"
    COPY_OR_VIEW = "contiguous reshape reshape_as flatten ravel to"
    PART = "__getitem__ select narrow slice unbind index_select"
    JOIN = "add sub cat concat concatenate hstack stack"  # of a residual stream with what is made of it
    # no arithmetic, besides views by schema, `*_like`, `new_*`, and copies, fills and parts as above
    FREE = """broadcast_tensors repeat repeat_interleave tile cat concat concatenate stack hstack vstack dstack
        column_stack __setitem__ gather scatter index_put index_copy index_fill take take_along_dim masked_fill
        masked_scatter masked_select where embedding pad constant_pad_nd roll flip fliplr flipud rot90 fold
        pixel_shuffle pixel_unshuffle channel_shuffle diag diag_embed tril triu type type_as float double half
        bfloat16 int long bool tensor arange linspace eye rand randn randint randperm normal bernoulli uniform
        multinomial nonzero argsort sort topk unique data meshgrid atleast_1d atleast_2d atleast_3d one_hot H T"""
    # this many operations for each output element, besides one for those tagged as pointwise
    COSTS_1 = """__truediv__ __rdiv__ floor_divide cumsum cumprod prelu rrelu tanhshrink softsign logsigmoid clip rsub
        greater greater_equal less less_equal hardswish __and__ __or__ __xor__ __invert__"""
    COSTS_2 = "addcmul addcdiv lerp glu"
    COSTS_3 = "softmax log_softmax softmin logsumexp"
    COSTS_5 = "batch_norm layer_norm group_norm instance_norm rms_norm local_response_norm normalize"
    # this many for each input element, besides one for those tagged as reductions
    COSTS_1_OF_READ = """median norm vector_norm nanmean adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
        adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d adaptive_max_pool2d_with_indices"""
    COSTS_3_OF_READ = "var std var_mean std_mean"


# Families whose output may be laid out otherwise, or share memory, and that write what their schemas do not say.
UNLIKE_THEIR_SCHEMAS = ("unsafe", "sparse", "spmm", "nested", "mkldnn", "quantize", "batch_norm")
