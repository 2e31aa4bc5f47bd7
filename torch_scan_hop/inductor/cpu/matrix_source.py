"""Factorisations of small matrices in C++, of several lanes at once.

An entry of a matrix is a vector with its value in each lane; of one lane, it is a number. Where
LAPACK would look at a number and go on in another way, all lanes go every way, and masks choose.

G. H. Golub, C. F. Van Loan, *Matrix Computations*, 4th ed.: substitution 3.1.1 and 3.1.2, LU with
partial pivoting 3.4.1, Cholesky 4.2.2.
"""

SOURCE = r"""
#ifndef SCAN_MATRICES
#define SCAN_MATRICES
#include <cmath>
#include <cstdint>
#include <type_traits>
#define SCAN_INLINE inline __attribute__((always_inline))
namespace {
// Vectors of L lanes as the compiler has them; they may begin anywhere.
template <class T, int L>
struct ScanLanes {
    using Int = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
    typedef T Value __attribute__((vector_size(L * sizeof(T)), aligned(alignof(T)), may_alias));
    using Mask = decltype(Value{} < Value{});
    static SCAN_INLINE bool any(const Mask& mask) {
        Int found = 0;
        for (int l = 0; l < L; ++l) found |= mask[l];
        return found != 0;
    }
    static SCAN_INLINE Value root(const Value& x) {
        Value found;
        for (int l = 0; l < L; ++l) found[l] = std::sqrt(x[l]);
        return found;
    }
};
template <class T>
struct ScanLanes<T, 1> {
    typedef T Value;
    typedef bool Mask;
    static SCAN_INLINE bool any(bool mask) { return mask; }
    static SCAN_INLINE T root(T x) { return std::sqrt(x); }
};

// Entry (i, j) of a matrix; strides count numbers.
template <class T, int L>
struct ScanMatrix {
    using Value = typename ScanLanes<T, L>::Value;
    T* first;
    int64_t row, column;
    SCAN_INLINE Value& operator()(int64_t i, int64_t j) const {
        return *reinterpret_cast<Value*>(first + i * row + j * column);
    }
};

// Writes value in the lanes of the mask; not over another one than 0, unless it may.
template <int L, class Mask>
SCAN_INLINE void scan_note(int32_t* to, const Mask& mask, int32_t value, bool over = true) {
    if constexpr (L == 1) {
        if (mask && (over || to[0] == 0)) to[0] = value;
    } else {
        for (int l = 0; l < L; ++l)
            if (mask[l] && (over || to[l] == 0)) to[l] = value;
    }
}

// Exchanges row k of x, in each lane, with the row that its pivot names (counted from 1).
template <class T, int L, int n, int m>
SCAN_INLINE void scan_exchange_row(ScanMatrix<T, L> x, int k, const int32_t* pivot) {
    using Lanes = ScanLanes<T, L>;
    for (int i = k + 1; i < n; ++i) {
        typename Lanes::Mask here;
        if constexpr (L == 1) here = pivot[0] == i + 1;
        else for (int l = 0; l < L; ++l) here[l] = pivot[l] == i + 1 ? -1 : 0;
        if (!Lanes::any(here)) continue;
        for (int j = 0; j < m; ++j) {
            const auto above = x(k, j), below = x(i, j);
            x(k, j) = here ? below : above;
            x(i, j) = here ? above : below;
        }
    }
}

// Exchanges rows so that the largest entry of each column is on the diagonal, and eliminates.
// pivots: [n], counted from 1; info: the first pivot that is zero, or 0.
template <class T, int L, int n>
SCAN_INLINE void scan_lu(ScanMatrix<T, L> a, int32_t* pivots, int32_t* info) {
    using Lanes = ScanLanes<T, L>;
    using Value = typename Lanes::Value;
    using Mask = typename Lanes::Mask;
    for (int l = 0; l < L; ++l) info[l] = 0;
    for (int k = 0; k < n; ++k) {
        int32_t* pivot = pivots + k * L;
        for (int l = 0; l < L; ++l) pivot[l] = k + 1;
        Value largest = a(k, k) < 0 ? -a(k, k) : a(k, k);
        for (int i = k + 1; i < n; ++i) {
            const Value size = a(i, k) < 0 ? -a(i, k) : a(i, k);
            const Mask larger = size > largest;
            largest = larger ? size : largest;
            scan_note<L>(pivot, larger, i + 1);
        }
        scan_exchange_row<T, L, n, n>(a, k, pivot);
        const Mask zero = a(k, k) == 0;
        if (Lanes::any(zero)) scan_note<L>(info, zero, k + 1, false);
        const Value one = Value{} + T(1);
        const Value divisor = zero ? one : a(k, k);
        for (int i = k + 1; i < n; ++i) {
            const Value factor = a(i, k) / divisor;
            a(i, k) = factor;
            for (int j = k + 1; j < n; ++j) a(i, j) -= factor * a(k, j);
        }
    }
}

// Exchanges rows of x as the factorisation did; back: in the other order.
template <class T, int L, int n, int m>
SCAN_INLINE void scan_exchange(ScanMatrix<T, L> x, const int32_t* pivots, bool back) {
    for (int step = 0; step < n; ++step) {
        const int k = back ? n - 1 - step : step;
        scan_exchange_row<T, L, n, m>(x, k, pivots + k * L);
    }
}

// x becomes the solution of a @ x = x, where a is triangular.
template <class T, int L, int n, int m>
SCAN_INLINE void scan_substitute(
    ScanMatrix<T, L> a, ScanMatrix<T, L> x, bool upper, bool unit
) {
    for (int step = 0; step < n; ++step) {
        const int i = upper ? n - 1 - step : step;
        for (int j = 0; j < m; ++j) {
            auto value = x(i, j);
            if (upper) for (int k = i + 1; k < n; ++k) value -= a(i, k) * x(k, j);
            else for (int k = 0; k < i; ++k) value -= a(i, k) * x(k, j);
            x(i, j) = unit ? value : value / a(i, i);
        }
    }
}

// The lower factor, with zeros above. A matrix with a minor that is not positive keeps its own
// entries from there on, as LAPACK leaves it. info: the order of that minor, or 0.
template <class T, int L, int n>
SCAN_INLINE void scan_cholesky(ScanMatrix<T, L> a, int32_t* info) {
    using Lanes = ScanLanes<T, L>;
    using Value = typename Lanes::Value;
    using Mask = typename Lanes::Mask;
    for (int l = 0; l < L; ++l) info[l] = 0;
    for (int j = 0; j < n; ++j) {
        Value pivot = a(j, j);
        for (int k = 0; k < j; ++k) pivot -= a(j, k) * a(j, k);
        Mask failed;
        if constexpr (L == 1) failed = info[0] != 0 || !(pivot > 0);
        else for (int l = 0; l < L; ++l) failed[l] = info[l] != 0 || !(pivot[l] > 0) ? -1 : 0;
        if (Lanes::any(failed)) scan_note<L>(info, failed, j + 1, false);
        const Value one = Value{} + T(1);
        const Value root = Lanes::root(failed ? one : pivot);
        a(j, j) = failed ? pivot : root;
        for (int i = j + 1; i < n; ++i) {
            Value value = a(i, j);
            for (int k = 0; k < j; ++k) value -= a(i, k) * a(j, k);
            value = value / root;
            a(i, j) = failed ? a(i, j) : value;
        }
        for (int i = 0; i < j; ++i) a(i, j) = Value{};
    }
}
}  // namespace
#endif
"""
