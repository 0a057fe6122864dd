//! The round trip of [`crate::steady`], with a client that is a task.

use std::cell::Cell;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context as Task, Wake, Waker};
use std::time::Duration;

use rdma_reactor::aio::AsyncReactor;
use rdma_reactor::{Config, ConnectionId, Context, Handler, Message, ProviderChoice, Reactor};

const SIZE: usize = 64;

/// Sends every message back.
struct Echo;

impl Handler for Echo {
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        cx.send(conn, &message).expect("room for an answer");
    }
}

/// The waker of an executor with one task.
#[derive(Default)]
struct Bell(AtomicBool);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

async fn ask(net: &AsyncReactor, address: SocketAddr, done: Rc<Cell<u64>>) {
    let conn = net.connect(address).await.expect("a connection");
    loop {
        conn.send(&[7; SIZE]).await.expect("it is open");
        let answer = conn.recv().await.expect("an answer");
        assert_eq!(answer.len(), SIZE);
        done.set(done.get() + 1);
    }
}

/// Does `times` round trips, or one more.
///
/// # Panics
/// Without a loopback device.
pub fn round_trips(times: u64) {
    let config = || Config::default().provider(ProviderChoice::Iwarp);
    let mut server = Reactor::new(config()).expect("a reactor");
    let listener = server.context().listen(([127, 0, 0, 1], 0).into()).expect("a listener");
    let address = server.context().local_address(listener).expect("it listens");
    let net = AsyncReactor::new(config()).expect("a reactor");
    let done = Rc::new(Cell::new(0));
    let mut task = pin!(ask(&net, address, Rc::clone(&done)));
    let bell = Arc::new(Bell(AtomicBool::new(true)));
    let waker = Waker::from(Arc::clone(&bell));
    while done.get() <= times {
        measured_turn(&net, &bell, &waker, task.as_mut());
        server.turn(&mut Echo, Duration::ZERO).expect("a turn");
    }
}

/// Does what an executor does: polls the task that was woken, waits for something to be asked for, and takes a turn. Only
/// instructions in this function count.
#[inline(never)]
fn measured_turn(net: &AsyncReactor, bell: &Bell, waker: &Waker, task: Pin<&mut impl Future<Output = ()>>) {
    let mut cx = Task::from_waker(waker);
    let mut asked = net.asked();
    let _ = Pin::new(&mut asked).poll(&mut cx);
    if bell.0.swap(false, Ordering::AcqRel) {
        assert!(task.poll(&mut cx).is_pending(), "it asks for ever");
    }
    drop(asked);
    net.turn(Duration::ZERO).expect("a turn");
}
