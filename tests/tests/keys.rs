//! Pre-shared keys are overwritten before their memory is freed.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use rdma_reactor::{Psk, Security};
use rdma_reactor_tests::sim::quiet::{Attempts, Node, network, reactor, until};
use rdma_reactor_tests::sim::tcp::address;

const KEY: [u8; 32] = *b"not overwritten in freed memory!";

/// An allocator that forwards all calls to the system's allocator. It searches memory for the key before it frees that memory.
struct Watching;

/// The number of freed allocations that contained the key.
static FOUND: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all calls are forwarded to the allocator of the system.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller upholds the same contract.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the allocation is valid until the call of `dealloc` below, and has this length.
        let found = unsafe { libc::memmem(memory.cast(), layout.size(), KEY.as_ptr().cast(), KEY.len()) };
        FOUND.fetch_add(usize::from(!found.is_null()), Ordering::Relaxed);
        // SAFETY: the caller upholds the same contract.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

/// Returns the number of allocations that are freed during `act` and contain the key.
fn found(act: impl FnOnce()) -> usize {
    let before = FOUND.load(Ordering::Relaxed);
    act();
    FOUND.load(Ordering::Relaxed) - before
}

/// Freed memory never contains a pre-shared key. The test reads the key from a list of keys that grows, or creates it from bytes. It then
/// copies the key, and uses it for a handshake on either side. This file has only one test, because the allocator serves the whole process.
#[test]
fn a_key_is_overwritten_before_its_memory_is_given_back() {
    assert_eq!(found(|| drop(std::hint::black_box(KEY.to_vec()))), 1, "what is not overwritten is found");
    let digits: String = KEY.iter().map(|byte| format!("{byte:02x}")).collect();
    let text: String = (0..100).map(|nth| format!("key-{nth}: {digits}\n")).collect();
    let read = || Psk::parse(&text).expect("good lines");
    assert_eq!(found(|| drop(read().clone())), 0, "a list that has grown");
    assert_eq!(found(|| assert!(Psk::parse(&format!("{text}wrong\n")).is_err())), 0, "a list that is refused");
    assert_eq!(found(|| drop(Psk::new("key-7", KEY).expect("a good key"))), 0, "a key alone");
    let handshakes = || {
        let (fabric, attempts) = (network(2), Attempts::default());
        let config = |psk| rdma_reactor::Config::default().security(Security::Psk(psk));
        let alone = Psk::new("key-7", KEY).expect("a good key");
        let mut nodes = [
            Node::new(reactor(0, &fabric, config(read())), Box::<Attempts>::default()),
            Node::new(reactor(1, &fabric, config(alone)), Box::new(attempts.clone())),
        ];
        nodes[0].reactor.context().listen(address(0, 7471)).expect("a free port");
        nodes[1].reactor.context().connect(address(0, 7471)).expect("connecting");
        until(&fabric, &mut nodes, "it is up", |_| attempts.up.borrow().len() == 1);
    };
    assert_eq!(found(handshakes), 0, "a handshake");
}
