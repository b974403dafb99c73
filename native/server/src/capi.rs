//! forebay's C API: the structs of `forebay.h`, and safe handles over its functions. All unsafe code is in this file.
//!
//! A test compares `LAYOUTS` and `CONSTANTS` with what a C compiler reads in the header.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_void};
use std::mem::{align_of, offset_of, size_of};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyImportError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyString, PyTuple};

/// The name of a struct in the header, its size, and each field with its offset.
pub type Layout = (&'static str, usize, &'static [(&'static str, usize)]);

macro_rules! structs {
    ($($(#[$about:meta])* $visible:vis struct $name:ident as $in_header:literal { $($of:vis $field:ident: $kind:ty,)* })*) => {
        $(
            $(#[$about])*
            #[repr(C)]
            #[allow(dead_code)] // The layout needs each field.
            $visible struct $name { $($of $field: $kind,)* }
        )*
        pub const LAYOUTS: &[Layout] = &[
            $(($in_header, size_of::<$name>(), &[$((stringify!($field), offset_of!($name, $field)),)*]),)*
        ];
    };
}

macro_rules! constants {
    ($($name:ident: $kind:ty = $value:literal,)*) => {
        $(const $name: $kind = $value;)*
        pub const CONSTANTS: &[(&str, i64)] = &[$((stringify!($name), $name as i64),)*];
    };
}

constants! {
    FOREBAY_API_VERSION: u32 = 1,
    FOREBAY_ALLOWED: i32 = 1,
    FOREBAY_HELD: i32 = 1,
    FOREBAY_COST_EXCEEDS_LIMIT: i32 = -2,
    FOREBAY_KEY_TEXT: u32 = 0,
    FOREBAY_KEY_PARTS: u32 = 4,
    FOREBAY_BOOK: u32 = 1,
    FOREBAY_MOST_LIMITS: usize = 16,
}

/// The most limits of one `decide_all`.
pub const MOST_LIMITS: usize = FOREBAY_MOST_LIMITS;

/// Bytes before the text of a part of a key: its kind and its size.
const PART_HEAD: usize = 1 + size_of::<u64>();

/// A function of the table that this crate doesn't call.
type Unused = usize;
type RawLimiter = c_void;
type RawThread = c_void;

structs! {
    struct Request as "forebay_request" {
        key: *const u8,
        key_size: u64,
        hash: u64,
        cost: u64,
        rate: *const c_void,
        max_delay_ns: u64,
        key_kind: u32,
        flags: u32,
    }

    /// A decision's numbers.
    #[derive(Clone, Copy, Debug, Default)]
    pub struct Decision as "forebay_result" {
        pub limit: u64,
        pub remaining: u64,
        pub retry_after_ns: u64,
        pub reset_after_ns: u64,
        pub delay_ns: u64,
        pub charge: u64,
        pub allowed: u32,
        pub full: u32,
        pub binding: u32,
        pub reserved: u32,
    }

    /// Permits of a concurrency limit that this process holds, until they are given back or the process ends.
    #[derive(Debug, Default)]
    pub struct Lease as "forebay_lease" {
        maker: u64,
        key: u64,
        cell: u64,
        slot: u64,
        permits: u64,
        owner: u64,
        end_ns: u64,
        full: u32,
        available: u32,
    }

    struct Api as "forebay_api" {
        version: u32,
        reserved: u32,
        size: u64,
        message: unsafe extern "C" fn(i32) -> *const c_char,
        limiter_open: unsafe extern "C" fn(*mut c_void, *mut *mut RawLimiter) -> i32,
        limiter_close: unsafe extern "C" fn(*mut RawLimiter),
        attach: unsafe extern "C" fn(*mut RawLimiter, *mut *mut RawThread) -> i32,
        detach: unsafe extern "C" fn(*mut RawThread),
        rate_open: Unused,
        rate_close: Unused,
        maintain: unsafe extern "C" fn(*mut RawLimiter) -> i32,
        hash: unsafe extern "C" fn(*const RawLimiter, u32, *const c_void, usize, *mut u64) -> i32,
        allow: Unused,
        allow_hash: Unused,
        tick: Unused,
        allow_at_tick: Unused,
        decide: unsafe extern "C" fn(*mut RawThread, *const Request, *mut Decision) -> i32,
        peek: unsafe extern "C" fn(*mut RawThread, *const Request, *mut Decision) -> i32,
        refund: unsafe extern "C" fn(*mut RawThread, *const Request, u64) -> i32,
        reset: unsafe extern "C" fn(*mut RawThread, *const Request) -> i32,
        decide_many: Unused,
        decide_all: unsafe extern "C" fn(*mut *mut RawThread, *const Request, usize, *mut Decision, *mut Decision) -> i32,
        acquire: unsafe extern "C" fn(*mut RawThread, *const Request, *mut Lease) -> i32,
        renew: unsafe extern "C" fn(*mut RawThread, *mut Lease) -> i32,
        release: unsafe extern "C" fn(*mut RawThread, *mut Lease) -> i32,
    }
}

/// What became of a request for permits that are held.
pub enum Acquired {
    Held(Lease),
    Denied {
        /// The permits that were free: fewer than the request needs.
        available: u64,
        /// Whether the store had no room for the key.
        is_full: bool,
    },
}

/// A negative status: a call has failed, and has charged nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure(i32);

impl Failure {
    /// The cost is above the limit, so that the request can never be allowed.
    pub fn is_cost(self) -> bool {
        self.0 == FOREBAY_COST_EXCEEDS_LIMIT
    }
}

fn checked(status: i32) -> Result<i32, Failure> {
    if status < 0 { Err(Failure(status)) } else { Ok(status) }
}

/// The table of functions. It is valid until the process ends.
#[derive(Clone, Copy)]
pub struct Core(&'static Api);

impl Core {
    pub fn import(py: Python<'_>) -> PyResult<Core> {
        let table = PyCapsule::import_pointer(py, c"forebay.core._C_API")?;
        // SAFETY: the capsule has a static table. Its first fields are the same in every version.
        let api = unsafe { table.cast::<Api>().as_ref() };
        if api.version != FOREBAY_API_VERSION || (api.size as usize) < size_of::<Api>() {
            return Err(PyImportError::new_err(format!(
                "forebay_server was built for version {FOREBAY_API_VERSION} of forebay's C API with {} bytes, and this \
                 forebay has version {} with {}: install forebay and forebay-server of one release",
                size_of::<Api>(),
                api.version,
                api.size,
            )));
        }
        Ok(Core(api))
    }

    pub fn message(self, failure: Failure) -> String {
        // SAFETY: never NULL, and static.
        unsafe { CStr::from_ptr((self.0.message)(failure.0)) }.to_string_lossy().into_owned()
    }
}

struct LimiterHandle {
    core: Core,
    raw: NonNull<RawLimiter>,
}

// SAFETY: forebay.h: all threads may use it at once.
unsafe impl Send for LimiterHandle {}
unsafe impl Sync for LimiterHandle {}

impl Drop for LimiterHandle {
    fn drop(&mut self) {
        // SAFETY: it is open, and this is its last use.
        unsafe { (self.core.0.limiter_close)(self.raw.as_ptr()) }
    }
}

/// An open limiter. A clone is the same handle, which the last of them closes.
#[derive(Clone)]
pub struct Limiter(Arc<LimiterHandle>);

impl Limiter {
    pub fn open(core: Core, object: &Bound<'_, PyAny>) -> Result<Limiter, Failure> {
        let mut raw = ptr::null_mut();
        // SAFETY: `object` is alive, and a `Bound` proves that this thread has the GIL.
        checked(unsafe { (core.0.limiter_open)(object.as_ptr().cast(), &mut raw) })?;
        let raw = NonNull::new(raw).expect("an open limiter has a handle");
        Ok(Limiter(Arc::new(LimiterHandle { core, raw })))
    }

    /// A handle for one thread. Takes the GIL for a moment.
    pub fn attach(&self) -> Result<Thread, Failure> {
        let mut raw = ptr::null_mut();
        // SAFETY: the limiter is open.
        checked(unsafe { (self.0.core.0.attach)(self.0.raw.as_ptr(), &mut raw) })?;
        Ok(Thread { core: self.0.core, raw: NonNull::new(raw).expect("an attached thread has a handle") })
    }

    /// The hash of a key: the same in all processes, until the store is made anew.
    pub fn hash(&self, key: &Key) -> u64 {
        let mut hash = 0;
        // SAFETY: the limiter is open, and the key outlives the call.
        let status = unsafe {
            let bytes = key.bytes.as_ptr().cast();
            (self.0.core.0.hash)(self.0.raw.as_ptr(), key.kind, bytes, key.bytes.len(), &mut hash)
        };
        checked(status).expect("only a key of an unknown kind has no hash");
        hash
    }

    /// Warn if the store's file was removed by others. Takes the GIL for a moment.
    pub fn maintain(&self) -> Result<(), Failure> {
        // SAFETY: the limiter is open.
        checked(unsafe { (self.0.core.0.maintain)(self.0.raw.as_ptr()) }).map(|_| ())
    }
}

/// A thread's handle of a limiter. It isn't `Sync`, so calls by `&self` are of one thread at a time.
pub struct Thread {
    core: Core,
    raw: NonNull<RawThread>,
}

// SAFETY: forebay.h: it may move from one thread to another.
unsafe impl Send for Thread {}

impl Drop for Thread {
    fn drop(&mut self) {
        // SAFETY: it is attached, and this is its last use.
        unsafe { (self.core.0.detach)(self.raw.as_ptr()) }
    }
}

/// For whom a request counts: text, or several texts, as Python's `str` and tuple of `str`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    kind: u32,
    bytes: Vec<u8>,
}

impl Key {
    pub fn text(text: &str) -> Key {
        Key { kind: FOREBAY_KEY_TEXT, bytes: text.as_bytes().to_vec() }
    }

    pub fn parts<'a>(parts: impl Iterator<Item = &'a str> + Clone) -> Key {
        let mut bytes = Vec::with_capacity(parts.clone().map(|part| PART_HEAD + part.len()).sum());
        for part in parts {
            push_part(&mut bytes, b's', part.as_bytes());
        }
        Key { kind: FOREBAY_KEY_PARTS, bytes }
    }

    /// The key with a text in front of its own texts, and perhaps a number behind that.
    pub fn behind(&self, text: &str, number: Option<u64>) -> Key {
        let mut bytes = Vec::new();
        push_part(&mut bytes, b's', text.as_bytes());
        if let Some(number) = number {
            // Two's complement, in as many bytes as the number and its sign take.
            let size = (u64::BITS - number.leading_zeros()) as usize / 8 + 1;
            push_part(&mut bytes, b'i', &u128::from(number).to_le_bytes()[..size]);
        }
        if self.kind == FOREBAY_KEY_TEXT {
            push_part(&mut bytes, b's', &self.bytes);
        } else {
            bytes.extend_from_slice(&self.bytes);
        }
        Key { kind: FOREBAY_KEY_PARTS, bytes }
    }

    /// As Python has it.
    pub fn in_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        if self.kind == FOREBAY_KEY_TEXT {
            return Ok(PyString::from_bytes(py, &self.bytes)?.into_any());
        }
        let mut parts = Vec::new();
        let mut rest = self.bytes.as_slice();
        while let Some((head, behind)) = rest.split_first_chunk::<PART_HEAD>() {
            let [kind, size @ ..] = *head;
            let (part, others) = behind.split_at(u64::from_le_bytes(size) as usize);
            parts.push(match kind {
                b's' => PyString::from_bytes(py, part)?.into_any(),
                // Of `behind`: two's complement, and never below 0.
                _ => {
                    let number = part.iter().rev().fold(0, |number: u128, byte| number << 8 | u128::from(*byte));
                    number.into_pyobject(py)?.into_any()
                }
            });
            rest = others;
        }
        Ok(PyTuple::new(py, parts)?.into_any())
    }

    /// Its bytes.
    pub fn size(&self) -> usize {
        self.bytes.len()
    }

    fn request(&self, cost: u64) -> Request {
        Request {
            // Of an empty `Vec`, too, it isn't NULL.
            key: self.bytes.as_ptr(),
            key_size: self.bytes.len() as u64,
            hash: 0,
            cost,
            rate: ptr::null(),
            max_delay_ns: 0,
            key_kind: self.kind,
            flags: 0,
        }
    }
}

fn push_part(bytes: &mut Vec<u8>, kind: u8, part: &[u8]) {
    bytes.push(kind);
    bytes.extend_from_slice(&(part.len() as u64).to_le_bytes());
    bytes.extend_from_slice(part);
}

/// A word of a mapped file, which other processes change.
pub struct Word {
    /// It keeps the mapping.
    buffer: PyBuffer<u8>,
    offset: usize,
}

impl Word {
    /// `memory`: the mapping, with Python's buffer protocol.
    pub fn new(memory: &Bound<'_, PyAny>, offset: usize) -> PyResult<Word> {
        let buffer = PyBuffer::<u8>::get(memory)?;
        let is_inside = offset.checked_add(size_of::<u64>()).is_some_and(|end| end <= buffer.len_bytes());
        if !is_inside || !(buffer.buf_ptr() as usize + offset).is_multiple_of(align_of::<AtomicU64>()) {
            return Err(PyValueError::new_err("there is no word at this place"));
        }
        Ok(Word { buffer, offset })
    }

    pub fn load(&self) -> u64 {
        // SAFETY: the word lies in the mapping, aligned, as `new` has checked, and everyone accesses it atomically.
        let word = unsafe { AtomicU64::from_ptr(self.buffer.buf_ptr().cast::<u8>().add(self.offset).cast()) };
        word.load(Ordering::Acquire)
    }
}

impl Thread {
    /// Charge a request if it is allowed.
    pub fn decide(&self, key: &Key, cost: u64) -> Result<Decision, Failure> {
        let mut decision = Decision::default();
        // SAFETY: the handle is attached, and the key outlives the call.
        checked(unsafe { (self.core.0.decide)(self.raw.as_ptr(), &key.request(cost), &mut decision) })?;
        Ok(decision)
    }

    /// Charge a request if it may proceed within a delay.
    pub fn book(&self, key: &Key, cost: u64, max_delay_ns: u64) -> Result<Decision, Failure> {
        let mut decision = Decision::default();
        let request = Request { max_delay_ns, flags: FOREBAY_BOOK, ..key.request(cost) };
        // SAFETY: as above.
        checked(unsafe { (self.core.0.decide)(self.raw.as_ptr(), &request, &mut decision) })?;
        Ok(decision)
    }

    /// Hold permits of a concurrency limit.
    pub fn acquire(&self, key: &Key, cost: u64) -> Result<Acquired, Failure> {
        let mut lease = Lease::default();
        // SAFETY: as above, and the lease is the caller's.
        let status = checked(unsafe { (self.core.0.acquire)(self.raw.as_ptr(), &key.request(cost), &mut lease) })?;
        Ok(match status {
            FOREBAY_ALLOWED => Acquired::Held(lease),
            _ => Acquired::Denied { available: lease.available.into(), is_full: lease.full != 0 },
        })
    }

    /// Restart a lease: false if it has lost its permits.
    pub fn renew(&self, lease: &mut Lease) -> Result<bool, Failure> {
        // SAFETY: as above.
        Ok(checked(unsafe { (self.core.0.renew)(self.raw.as_ptr(), lease) })? == FOREBAY_HELD)
    }

    /// Give the permits of a lease back: whether any were still held.
    pub fn release(&self, lease: &mut Lease) -> Result<bool, Failure> {
        // SAFETY: as above.
        Ok(checked(unsafe { (self.core.0.release)(self.raw.as_ptr(), lease) })? == FOREBAY_HELD)
    }

    /// The decision that `decide` would return now. Charges nothing.
    pub fn peek(&self, key: &Key, cost: u64) -> Result<Decision, Failure> {
        let mut decision = Decision::default();
        // SAFETY: as above.
        checked(unsafe { (self.core.0.peek)(self.raw.as_ptr(), &key.request(cost), &mut decision) })?;
        Ok(decision)
    }

    /// Forget the key: its next request finds a fresh key.
    pub fn reset(&self, key: &Key) -> Result<(), Failure> {
        // SAFETY: as above.
        checked(unsafe { (self.core.0.reset)(self.raw.as_ptr(), &key.request(0)) }).map(|_| ())
    }

    /// Give back what still counts of an allowed request with this charge. 0 is none, as of one that was allowed as the
    /// store had no room: nothing comes back.
    pub fn refund(&self, key: &Key, cost: u64, charge: u64) -> Result<(), Failure> {
        if charge == 0 {
            return Ok(());
        }
        // SAFETY: as above.
        checked(unsafe { (self.core.0.refund)(self.raw.as_ptr(), &key.request(cost), charge) }).map(|_| ())
    }

    /// The same for a key with this hash.
    pub fn refund_hash(&self, hash: u64, cost: u64, charge: u64) -> Result<(), Failure> {
        if charge == 0 {
            return Ok(());
        }
        let request = Request { key: ptr::null(), key_size: 0, hash, ..Key::text("").request(cost) };
        // SAFETY: as above. A request without a key has its hash.
        checked(unsafe { (self.core.0.refund)(self.raw.as_ptr(), &request, charge) }).map(|_| ())
    }
}

/// Decide a request to up to `MOST_LIMITS` limits of one store, all or none: whether it is allowed, and the decision of
/// each limit, in order.
pub fn decide_all(parts: &[(&Thread, &Key, u64)]) -> Result<(bool, Vec<Decision>), Failure> {
    let Some((first, _, _)) = parts.first() else { return Ok((true, Vec::new())) };
    assert!(parts.len() <= MOST_LIMITS);
    let mut threads: Vec<*mut RawThread> = parts.iter().map(|(thread, _, _)| thread.raw.as_ptr()).collect();
    let requests: Vec<Request> = parts.iter().map(|(_, key, cost)| key.request(*cost)).collect();
    let mut each = vec![Decision::default(); parts.len()];
    // SAFETY: all three arrays have as many items, and the keys outlive the call.
    let status = unsafe {
        let decide_all = first.core.0.decide_all;
        decide_all(threads.as_mut_ptr(), requests.as_ptr(), parts.len(), ptr::null_mut(), each.as_mut_ptr())
    };
    Ok((checked(status)? == FOREBAY_ALLOWED, each))
}
