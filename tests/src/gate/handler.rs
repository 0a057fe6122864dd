//! A handler that can panic at the request of a test.

use std::time::Duration;

use rdma_reactor::{
    ConnectError, ConnectRequest, ConnectionId, Context, Decision, DisconnectReason, Failure, Handler, Immediate,
    Message, Offered, Outcome, SendId, TimerId, TransferEnd, TransferId,
};

use super::{Call, Gate};

/// A [`Handler`] that queries a [`Gate`] at the end of each callback. It panics if the gate requests that.
#[derive(Debug)]
pub struct GatedHandler<H> {
    inner: H,
    gate: Gate,
}

impl<H> GatedHandler<H> {
    /// Makes a handler that forwards to `inner` and queries `gate`.
    pub const fn new(inner: H, gate: Gate) -> Self {
        Self { inner, gate }
    }

    /// Forwards a callback, then queries the gate.
    fn pass<R>(&mut self, call: impl FnOnce(&mut H) -> R) -> R {
        let result = call(&mut self.inner);
        if let Some(failure) = self.gate.pass(Call::Callback) {
            panic!("{}", failure.system());
        }
        result
    }
}

impl<H: Handler> Handler for GatedHandler<H> {
    fn on_connect(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.pass(|inner| inner.on_connect(cx, conn));
    }
    fn on_recv(&mut self, cx: &mut Context<'_>, conn: ConnectionId, message: Message<'_>) {
        self.pass(|inner| inner.on_recv(cx, conn, message));
    }
    fn on_send_complete(&mut self, cx: &mut Context<'_>, conn: ConnectionId, send: SendId, outcome: Outcome) {
        self.pass(|inner| inner.on_send_complete(cx, conn, send, outcome));
    }
    fn on_writable(&mut self, cx: &mut Context<'_>, conn: ConnectionId) {
        self.pass(|inner| inner.on_writable(cx, conn));
    }
    fn on_disconnect(&mut self, cx: &mut Context<'_>, conn: ConnectionId, reason: DisconnectReason) {
        self.pass(|inner| inner.on_disconnect(cx, conn, reason));
    }
    fn on_timer(&mut self, cx: &mut Context<'_>, timer: TimerId, token: u64) {
        self.pass(|inner| inner.on_timer(cx, timer, token));
    }
    fn on_connect_error(&mut self, cx: &mut Context<'_>, conn: ConnectionId, error: ConnectError) {
        self.pass(|inner| inner.on_connect_error(cx, conn, error));
    }
    fn on_connect_request(&mut self, cx: &mut Context<'_>, request: ConnectRequest<'_>) -> Decision {
        self.pass(|inner| inner.on_connect_request(cx, request))
    }
    fn on_immediate(&mut self, cx: &mut Context<'_>, conn: ConnectionId, immediate: Immediate) {
        self.pass(|inner| inner.on_immediate(cx, conn, immediate));
    }
    fn on_offer(&mut self, cx: &mut Context<'_>, conn: ConnectionId, offer: Offered) {
        self.pass(|inner| inner.on_offer(cx, conn, offer));
    }
    fn on_landed(&mut self, cx: &mut Context<'_>, conn: ConnectionId, offer: Offered, result: Result<(), Failure>) {
        self.pass(|inner| inner.on_landed(cx, conn, offer, result));
    }
    fn on_transfer(&mut self, cx: &mut Context<'_>, conn: ConnectionId, transfer: TransferId, end: TransferEnd) {
        self.pass(|inner| inner.on_transfer(cx, conn, transfer, end));
    }
    fn on_drain(&mut self, cx: &mut Context<'_>, deadline: Duration) {
        self.pass(|inner| inner.on_drain(cx, deadline));
    }
}
