//! Compares the number of a receiver's wake-ups in two cases: the receiver's completion queue is armed for solicited completions, or for
//! all completions.
//!
//! `rdma-solicited verbs|iwarp ADDRESS MESSAGES EVERY` sends MESSAGES messages from one queue pair to another, on a device or on the
//! embedded provider. The messages are sent in bursts of EVERY. The last message of each burst is solicited. The program prints the number
//! of the receiver's wake-ups. It fails if a message that must wake the receiver does not wake it. If the device cannot report solicited
//! events (`Features::SOLICITED_EVENTS`), the program prints that. A device may raise more events than the receiver requested. rxe raises
//! no additional events. The embedded provider raises one event for each message.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "a program, not the library")]

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use rdma_reactor_tests::ends::{End, Pair};
use rdma_transport::{Channel, Drive, Features, Notify, Provider, SendFlags, SendOp, WcOpcode};
use rdma_transport_embedded::iwarp::{Iwarp, IwarpConfig, TcpNet};
use rdma_transport_verbs::Verbs;

/// The length in bytes of a message, and of each side's memory.
const SIZE: usize = 64;
const MEMORY: usize = 1 << 16;
/// The time limit for the event that the receiver waits for.
const PATIENCE: Duration = Duration::from_secs(60);

/// Sends messages in bursts of `every`. The last message of each burst is solicited. `notify` is the kind of completions for which the
/// receiver's queue is armed. Returns the number of the receiver's wake-ups.
fn wakeups(pair: &mut Pair, messages: u64, every: u64, notify: Notify) -> u64 {
    let device = pair.passive.device;
    let cq = pair.passive.cq().expect("it has a queue pair");
    let channel = pair.passive.station.provider().channel(Channel::Completions(device)).expect("a channel");
    let mut poll = Poll::new().expect("epoll");
    poll.registry().register(&mut SourceFd(&channel), Token(0), Interest::READABLE).expect("a descriptor");
    let mut woken = 0;
    let mut events = Events::with_capacity(8);
    for burst in 0..messages / every {
        for nth in 0..every {
            let start = nth as usize * SIZE;
            pair.passive.recv(nth, &[start..start + SIZE]);
        }
        pair.passive.station.provider().req_notify(cq, notify).expect("a queue to arm");
        let mut left = every;
        for nth in 0..every {
            let (last, flags) = (nth + 1 == every, SendFlags::SIGNALED);
            let flags = if last { flags | SendFlags::SOLICITED } else { flags };
            pair.active.post(nth, SendOp::Send, &[0..SIZE], flags);
            // The next message is posted only after the send of this message has completed.
            while pair.active.done.pop().is_none() {
                pair.active.turn();
            }
            // The receiver waits only for messages that must wake it.
            let must = last || notify == Notify::Any;
            let provider = pair.passive.station.provider();
            let before = woken;
            loop {
                poll.poll(&mut events, Some(if must { PATIENCE } else { Duration::ZERO })).expect("a wait");
                assert!(!must || !events.is_empty(), "message {nth} of burst {burst} has not woken the receiver");
                // The embedded provider also wakes the process when it must read from a socket. Only events of the completion queue are
                // counted as wake-ups.
                provider.progress(Instant::now(), Drive::Full);
                while provider.next_completion_event(device).expect("an event").is_some() {
                    woken += 1;
                }
                if woken > before || !must {
                    break;
                }
            }
            if woken > before {
                // The queue is armed first and drained afterwards, so a completion that arrives after the drain wakes the receiver.
                provider.req_notify(cq, notify).expect("a queue to arm");
                pair.passive.turn();
                left -= pair.passive.done.drain(..).filter(|wc| wc.opcode == WcOpcode::Recv).count() as u64;
            }
        }
        assert_eq!(left, 0, "the last message has woken the receiver, and all others were there");
    }
    woken
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [kind, address, messages, every] = &args[..] else {
        panic!("rdma-solicited verbs|iwarp ADDRESS MESSAGES EVERY")
    };
    let address: SocketAddr = SocketAddr::new(address.parse().expect("an address"), 0);
    let (messages, every): (u64, u64) = (messages.parse().expect("a number"), every.parse().expect("a number"));
    assert!((1..=64).contains(&every) && messages >= every, "1 to 64 messages a burst");
    let provider = || -> Box<dyn Provider> {
        if kind == "verbs" {
            return Box::new(Verbs::open().expect("a device"));
        }
        let net = TcpNet::new().expect("epoll");
        Box::new(Iwarp::new(IwarpConfig::default(), net, Box::new(|bytes| bytes.fill(7))).expect("default settings"))
    };
    let [active, passive] = [(), ()].map(|()| End::new(provider(), MEMORY));
    let mut pair = Pair::connect(active, passive, address, 1);
    let (device, provider) = (pair.passive.device, pair.passive.station.provider());
    let has =
        provider.device(device).is_some_and(|info| info.capabilities.features.contains(Features::SOLICITED_EVENTS));
    let messages = messages / every * every;
    // The run with solicited completions is the first one. After a run with all completions, the
    // queue would still be armed for all of them, and could not be armed for solicited ones until a
    // completion arrives.
    if has {
        let solicited = wakeups(&mut pair, messages, every, Notify::Solicited);
        println!("{messages} messages, armed for solicited ones, 1 of {every}: {solicited} wake-ups");
        assert!((messages / every..=messages).contains(&solicited), "one for each that was solicited, at least");
    } else {
        let cq = pair.passive.cq().expect("it has a queue pair");
        let refused = pair.passive.station.provider().req_notify(cq, Notify::Solicited);
        println!("armed for solicited ones: {}", refused.expect_err("the device has no such events"));
    }
    let any = wakeups(&mut pair, messages, every, Notify::Any);
    println!("{messages} messages, armed for any: {any} wake-ups");
    assert_eq!(any, messages, "one for each");
}
