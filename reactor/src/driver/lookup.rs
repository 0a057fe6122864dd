//! Host names of peers. They are looked up on other threads, because `getaddrinfo`(3) blocks.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::thread;

use crossbeam_channel::{Receiver, Sender, unbounded};
use rdma_transport::cm::{ExchangeOptions, PathOptions};

use super::Driver;
use super::fallback::{Fallback, by_turns};
use super::stages::Stages;
use crate::conn::state::Ending;
use crate::error::ConnectError;
use crate::id::ConnectionId;
use crate::providers::Handle;
use crate::seam::wake::WakeFlag;

/// Largest number of names that are looked up at a time. Others wait for their turn; the connect timeout counts meanwhile.
const THREADS: usize = 4;

/// A name to look up, for a connection.
#[derive(Debug)]
struct Question {
    of: ConnectionId,
    host: String,
    port: u16,
    path: PathOptions,
    exchange: Option<ExchangeOptions>,
}

/// The addresses of a name.
#[derive(Debug)]
struct Answer {
    question: Question,
    addresses: io::Result<Vec<SocketAddr>>,
}

/// See the [module](self). The threads end when this is dropped, each after the name that it looks up.
#[derive(Debug)]
pub(super) struct Lookups {
    questions: (Sender<Question>, Receiver<Question>),
    answers: (Sender<Answer>, Receiver<Answer>),
    threads: usize,
}

impl Default for Lookups {
    fn default() -> Self {
        Self { questions: unbounded(), answers: unbounded(), threads: 0 }
    }
}

impl Lookups {
    fn ask(&mut self, question: Question, wake: &Arc<WakeFlag>) -> io::Result<()> {
        if self.threads < THREADS {
            let (questions, answers, wake) = (self.questions.1.clone(), self.answers.0.clone(), Arc::clone(wake));
            let work = move || {
                for question in questions {
                    let addresses = (&*question.host, question.port).to_socket_addrs().map(Iterator::collect);
                    if answers.send(Answer { question, addresses }).is_err() {
                        return;
                    }
                    wake.wake();
                }
            };
            thread::Builder::new().name("rdma-reactor-names".into()).spawn(work)?;
            self.threads += 1;
        }
        // This value has a receiver, so that sending cannot fail.
        let _ = self.questions.0.send(question);
        Ok(())
    }
}

impl Driver {
    /// Has the name of a connection's peer looked up.
    pub(super) fn look_up(
        &mut self,
        of: ConnectionId,
        (host, port): (String, u16),
        path: PathOptions,
        exchange: Option<ExchangeOptions>,
    ) -> io::Result<()> {
        self.lookups.ask(Question { of, host, port, path, exchange }, &self.os.wake)
    }

    /// Takes the addresses that were found, and connects to them.
    pub(super) fn take_lookups(&mut self) {
        while let Ok(Answer { question, addresses }) = self.lookups.answers.1.try_recv() {
            let Question { of, host, path, exchange, .. } = question;
            // The program may have given the connection up meanwhile, or its time may be over.
            if !self.table.get(of).is_some_and(|seat| seat.link.cm == Handle::NONE && seat.conn.state().is_handshake())
            {
                continue;
            }
            let error = match addresses {
                Err(error) => ConnectError::Lookup { host, why: error.to_string() },
                Ok(addresses) => {
                    if let Some(seat) = self.table.get_mut(of) {
                        seat.link.fallback = Some(Fallback::new(by_turns(&addresses), path, exchange));
                    }
                    if self.attempt_next(of) {
                        continue;
                    }
                    let why = format!("{host}: none of its {} addresses can be connected to", addresses.len());
                    ConnectError::Local(why)
                }
            };
            let ending = Ending::ConnectError(error);
            self.input(of, |conn, env| conn.end(ending, env));
            self.note(Stages::ENDS);
        }
    }
}
