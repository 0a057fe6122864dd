//! The providers of this project, as arguments for the provider conformance suite ([`rdma_transport::conformance`]).

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rdma_transport::conformance::{Deviation, Environment, Factory, Need, System};
use rdma_transport::provider::Provider;
use rdma_transport_embedded::iwarp::{Iwarp, IwarpConfig, SharedMemoryPolicy};

use crate::forward::Forward;
use crate::gate::Gate;
use crate::loopback::{Loopback, Network};
use crate::mutant::{Defect, Mutant};
use crate::null::Null;
use crate::parts::embedded_with;
use crate::patience::PATIENCE;
use crate::sim::environment::VirtualTime;
use crate::sim::fabric::{Fabric, Shared};
use crate::sim::hardware::HardwareProvider;
use crate::sim::net::SimNet;
use crate::sim::rng::Rng;
use crate::sim::swarm::{FaultOptions, HardwareOptions, MS, NetOptions};
use crate::sim::tcp;
use crate::sim::trace::Trace;

/// A provider for the test cases. The box gives all kinds of providers one type.
pub type Boxed = Box<dyn Provider>;

// Providers in real time.

/// A kind of providers on real sockets, or on devices of this host. They run in real time.
#[derive(Debug)]
pub struct Real {
    /// The name of the providers' device.
    pub device: &'static str,
    /// The address that all sides listen on.
    pub address: SocketAddr,
    /// The function that creates the providers. Its argument is the number of providers.
    pub providers: fn(usize) -> Vec<Boxed>,
    /// The requirements of test cases that the device does not meet. Such cases are not run.
    pub missing: &'static [Need],
    /// The known deviations of the device from the contract.
    pub deviations: &'static [Deviation],
}

impl Factory for Real {
    fn device(&self) -> &str {
        self.device
    }
    fn open(&self, sides: usize) -> (Vec<Boxed>, Box<dyn Environment>) {
        ((self.providers)(sides), Box::new(System::new()))
    }
    fn address(&self, _: usize) -> SocketAddr {
        self.address
    }
    fn missing(&self) -> &[Need] {
        self.missing
    }
    fn deviations(&self) -> &[Deviation] {
        self.deviations
    }
}

const LOOPBACK: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Returns settings of the embedded provider with all extensions.
fn extended() -> IwarpConfig {
    let mut config = IwarpConfig::default();
    config.extensions = true;
    config
}

/// The embedded provider.
pub const EMBEDDED: Real = Real {
    device: "iwarp0",
    address: LOOPBACK,
    providers: |sides| (0..sides).map(|_| Box::new(embedded_with(extended())) as _).collect(),
    missing: &[
        Need::SendWithImmediate,
        Need::OffLoopRegistration,
        Need::Adapter,
        Need::DeviceEvents,
        Need::SharedMemory,
    ],
    deviations: &[],
};

/// Returns settings of the embedded provider with which all connections use shared memory.
fn shared() -> IwarpConfig {
    let mut config = extended();
    config.shared_memory = SharedMemoryPolicy::Require;
    // Even a busy machine does not reach this limit.
    config.within_host.meeting_timeout = PATIENCE;
    config
}

/// The embedded provider with connections in shared memory.
pub const SHARED: Real = Real {
    providers: |sides| (0..sides).map(|_| Box::new(embedded_with(shared())) as _).collect(),
    missing: &[Need::SendWithImmediate, Need::OffLoopRegistration, Need::Adapter, Need::DeviceEvents],
    ..EMBEDDED
};

/// A [`crate::forward::Forward`] provider that forwards calls to the embedded provider.
pub const FORWARD: Real = Real {
    device: "forward",
    providers: |sides| {
        let forward = |_| Box::new(Forward::gated(Box::new(embedded_with(extended())), Gate::default())) as _;
        (0..sides).map(forward).collect()
    },
    missing: &[Need::SendWithImmediate, Need::OffLoopRegistration, Need::Handover, Need::SharedMemory],
    ..EMBEDDED
};

/// The deviations of the null devices, which do only what a reactor needs in a measurement.
const SHORTCUTS: &[Deviation] = &[
    alone("a_destroyed_queue_pair_gives_its_places_back"),
    alone("a_disconnect_flushes_everything_once"),
    alone("a_queue_pair_comes_before_the_connection"),
    alone("a_reject_carries_private_data"),
    alone("an_end_leaves_the_others_alone"),
    alone("both_sides_learn_of_a_disconnect"),
    alone("destroying_tells_the_peer"),
    alone("private_data_goes_both_ways"),
    alone("queues_share_a_channel"),
    one_entry("a_chain_is_taken_up_to_the_fault"),
    one_entry("a_message_is_gathered_and_scattered"),
    one_entry("a_message_that_is_too_long_is_not_delivered"),
    shortcut("nothing_happens_after_a_destroy", "has a receive for each message", "credits are given for receives"),
    shortcut("a_full_queue_is_backpressure", "counts no receives", "more receives than the queue has room for"),
    shortcut("a_receive_after_the_flush_is_not_filled", "does not note its end", "credits are given for receives"),
    shortcut("a_send_after_the_flush_is_flushed", "does not note its end", "credits are given for receives"),
    shortcut("a_stale_handle_is_an_error", "does not look at handles", "req_notify: Ok"),
];

const fn shortcut(case: &'static str, what: &'static str, finds: &'static str) -> Deviation {
    Deviation { case, device: "null", what, finds }
}

const fn alone(case: &'static str) -> Deviation {
    shortcut(case, "has one connection", "second connection")
}

const fn one_entry(case: &'static str) -> Deviation {
    shortcut(case, "has receives of one entry, which messages fit", "messages fit the receives")
}

/// The null devices of [`crate::null`], whose operations cost almost no instructions. They support one connection and sends.
pub const NULL: Real = Real {
    device: "null",
    providers: |_| Null::pair().map(|provider| Box::new(provider) as _).into(),
    missing: &[
        Need::Reads,
        Need::Writes,
        Need::Atomics,
        Need::SendWithImmediate,
        Need::WriteWithImmediate,
        Need::RemoteInvalidation,
        Need::SharedReceives,
        Need::RemoteKeys,
        Need::Liveness,
        Need::Extensions,
        Need::Handover,
        Need::OffLoopRegistration,
        Need::Adapter,
        Need::DeviceEvents,
        Need::ImmediateSends,
        Need::SharedMemory,
    ],
    deviations: SHORTCUTS,
    ..EMBEDDED
};

/// The provider that connects reactors within one process.
pub const IN_PROCESS: Real = Real {
    device: "loopback0",
    providers: |sides| {
        let network = Network::default();
        let provider = |_| Box::new(Loopback::new(&network, LOOPBACK.ip()).expect("descriptors")) as _;
        (0..sides).map(provider).collect()
    },
    missing: &[
        Need::Atomics,
        Need::SendWithImmediate,
        Need::WriteWithImmediate,
        Need::RemoteInvalidation,
        Need::SharedReceives,
        Need::RemoteKeys,
        Need::Liveness,
        Need::Extensions,
        Need::Handover,
        Need::OffLoopRegistration,
        Need::Adapter,
        Need::DeviceEvents,
        Need::ImmediateSends,
        Need::SharedMemory,
    ],
    ..EMBEDDED
};

/// The deviations of the provider `verbs` on the kernel's software devices in Linux 6.1. `docs/design/verbs-provider.md` lists all
/// differences between these devices.
pub const KERNEL: &[Deviation] = &[
    Deviation { device: "rxe", ..NO_DEADLINE },
    NO_DEADLINE,
    Deviation {
        case: "a_read_without_the_right_is_refused",
        device: "siw",
        what: "serves Reads of a region with the right to write only",
        finds: "the peer has served it",
    },
    Deviation {
        case: "a_send_after_the_flush_is_flushed",
        device: "siw",
        what: "never completes a send that is posted to a flushed queue pair",
        finds: "no completion",
    },
];

const NO_DEADLINE: Deviation = Deviation {
    case: "an_attempt_ends_at_its_deadline",
    device: "siw",
    what: "the provider `verbs` keeps the deadline while it resolves the address, and leaves the rest to the kernel",
    finds: "no ConnectFailed",
};

// Providers on virtual time.

/// A kind of providers on the sockets of a simulated network.
#[derive(Debug)]
pub struct Virtual<T> {
    /// The name of the providers' device.
    pub device: &'static str,
    /// The seed of the network's and the providers' random numbers.
    pub seed: u64,
    /// The data that `provider` needs to wrap the embedded provider.
    pub with: T,
    /// The function that creates the provider of a side, given its embedded provider.
    pub provider: fn(&T, Iwarp<SimNet>, usize, &Shared, u64) -> Boxed,
    /// The requirements of test cases that the device does not meet. Such cases are not run.
    pub missing: &'static [Need],
}

/// Returns a simulated network that delays data and splits it, but loses nothing.
fn network(seed: u64, nodes: usize) -> Shared {
    let net = NetOptions {
        segment: 1448,
        latency: (5_000, 200_000),
        buffer: 1 << 18,
        short_write: 50,
        interrupted: 20,
        shred: 20,
        spurious: 20,
        poll_cut: 20,
        exhausted: 0,
        lost_connect: 0,
        tick: 100,
    };
    let faults = FaultOptions { every: 0, kinds: Vec::new() };
    Arc::new(Mutex::new(Fabric::new(seed, nodes, net, faults, Trace::new(0))))
}

impl<T: std::fmt::Debug> Factory for Virtual<T> {
    fn device(&self) -> &str {
        self.device
    }
    fn open(&self, sides: usize) -> (Vec<Boxed>, Box<dyn Environment>) {
        let fabric = network(self.seed, sides);
        let provider = |node: usize| {
            let mut rng = Rng::new(self.seed ^ node as u64, "entropy");
            let entropy = Box::new(move |bytes: &mut [u8]| rng.fill(bytes));
            let inner = Iwarp::new(extended(), SimNet::new(node, Arc::clone(&fabric)), entropy).expect("good settings");
            (self.provider)(&self.with, inner, node, &fabric, self.seed)
        };
        ((0..sides).map(provider).collect(), Box::new(VirtualTime::new(&fabric, sides)))
    }
    fn address(&self, side: usize) -> SocketAddr {
        tcp::address(side, 0)
    }
    fn missing(&self) -> &[Need] {
        self.missing
    }
    fn patience(&self) -> Duration {
        Duration::from_secs(20)
    }
    fn grace(&self) -> Duration {
        Duration::from_millis(100)
    }
}

/// A simulated device. Its completions and events arrive at random times, as the contract permits. A `Disconnected` event is never
/// lost, because the test cases wait for it.
const HARDWARE: HardwareOptions = HardwareOptions {
    late: 300,
    late_by: 5 * MS,
    cm_late: 300,
    short_poll: 300,
    before_arming: 300,
    lazy_flush: 100,
    twice: 300,
    never: 0,
    purge: 300,
    extensions: true,
    overtaking: true,
    keeps: 0,
};

/// Returns the providers of the simulated device.
#[must_use]
pub const fn hardware(seed: u64) -> Virtual<HardwareOptions> {
    Virtual {
        device: "hardware",
        seed,
        with: HARDWARE,
        provider: |options, inner, node, fabric, seed| {
            let rng = Rng::new(seed ^ node as u64, "hardware");
            Box::new(HardwareProvider::new(inner, node, Arc::clone(fabric), options.clone(), rng))
        },
        missing: &[
            Need::SendWithImmediate,
            Need::SharedReceives,
            Need::Handover,
            Need::OffLoopRegistration,
            Need::Adapter,
            Need::DeviceEvents,
            Need::ImmediateSends,
            Need::SharedMemory,
        ],
    }
}

/// Returns embedded providers with a deliberate defect.
#[must_use]
pub const fn mutant(defect: Defect) -> Virtual<Defect> {
    Virtual {
        device: "mutant",
        seed: 0,
        with: defect,
        provider: |&defect, inner, _, _, _| Box::new(Mutant::new(inner, defect)),
        missing: &[
            Need::SendWithImmediate,
            Need::Handover,
            Need::OffLoopRegistration,
            Need::Adapter,
            Need::DeviceEvents,
            Need::SharedMemory,
        ],
    }
}
